r"""Cutting long texts at places where tokens always end, so that the parts give the ids of the whole.

The `tokenizers` library needs some 160 bytes per character of what it encodes at once: 8 GB for a document of 50 MB.
So long texts are encoded in parts, cut between a letter or digit and a following space or newline, if the tokenizer
never joins those two. That is known of a pipeline that consists only of:

- Added tokens: none that text can spell contains such a place, takes in the white space after it (`rstrip`) or
  checks its neighbours (`single_word`).
- Normalizer: none, NFC or NFKC. A letter or digit at such a place stays one, and nothing is joined across it.
- Pre-tokenizer: splits by regular expressions whose alternatives are all in `_ALTERNATIVES`. None of these matches a
  letter or digit together with following white space; none looks back; the only one that looks ahead starts at white
  space. One of them matches any white space, so a piece always begins at such a place. What a further pre-tokenizer
  does, it does inside the pieces.
- The model sees one piece at a time.

Any other tokenizer gets whole texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

CUT = re.compile(r"(?<=[0-9A-Za-zÀ-ÖØ-öø-ľŁ-ňΑ-Ρα-ωА-яא-תء-غぁ-ゖァ-ヺ一-龥가-힣])[ \n]")
_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_ALTERNATIVES = {
    *_CONTRACTIONS.split("|"),
    f"(?i:{_CONTRACTIONS})",
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    *_CASED,
    *(f"{cased}(?i:{_CONTRACTIONS})?" for cased in _CASED),
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"\p{N}",
    r"\p{N}{1,3}",
    r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r"\s+(?!\S)",
    r"\s+",
}
"""From the expressions of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2, Mistral and DeepSeek 3."""
_CLASS = r"\\.|\[(?:\\.|[^\\\]])*\]"
_ALTERNATIVE = re.compile(rf"(?:{_CLASS}|\((?:{_CLASS}|[^\\()\[\]])*\)|[^\\()\[\]|])+", re.DOTALL)
"""The text between those `|` of an expression that are in no class or group."""


def can_cut(pipeline: dict[str, Any], normalized: dict[str, str]) -> bool:
    """Whether texts may be cut at `CUT`.

    Args:
        pipeline: contents of a `tokenizer.json`.
        normalized: what the normalizer makes of the content of each added token.
    """
    added = pipeline["added_tokens"]
    contents = [content for token in added for content in (token["content"], normalized[token["content"]])]
    if any(CUT.search(content) for content in contents):
        return False
    if any(not token["special"] and (token["rstrip"] or token["single_word"]) for token in added):
        return False
    if any(step["type"] not in ("NFC", "NFKC") for step in _steps(pipeline["normalizer"], "normalizers")):
        return False
    steps = list(_steps(pipeline["pre_tokenizer"], "pretokenizers"))
    return all(map(_keeps, steps)) and any(map(_separates, steps))


def parts(text: str, size: int) -> Iterator[str]:
    """`text` in parts of at least `size` characters (the last may be shorter), cut at the next `CUT`."""
    begin = 0
    while begin < len(text):
        cut = CUT.search(text, begin + size)
        end = cut.start() if cut else len(text)
        yield text[begin:end]
        begin = end


def _steps(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for item in step[inner]:
            yield from _steps(item, inner)
    else:
        yield step


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer's pieces on one side of a cut do not depend on the other side."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return step["type"] == "Digits" or _alternatives(step) <= _ALTERNATIVES


def _separates(step: dict[str, Any]) -> bool:
    """Whether it begins a piece at every cut."""
    if step["type"] == "ByteLevel":
        return bool(step["use_regex"])
    return step["type"] == "Split" and r"\s+" in _alternatives(step)


def _alternatives(step: dict[str, Any]) -> set[str]:
    """Alternatives of the regular expression of a `Split`; for anything else, or nested groups, an unlisted one."""
    expression = step.get("pattern", {}).get("Regex") if step["type"] == "Split" else None
    if expression is None or (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
        return {""}
    found = _ALTERNATIVE.findall(expression)
    return set(found) if found and "|".join(found) == expression else {""}
