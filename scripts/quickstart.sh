#!/usr/bin/env bash
# From a fresh clone to an evaluated checkpoint: setup, real text, tokenizer, shards, validation, training under
# torchrun with hybrid sharding, evaluation by lm-eval. CPU is enough; nothing but Python packages is downloaded.
#
#   scripts/quickstart.sh            about ten minutes on two cores, half of it installing packages; started again, it
#                                    continues where it was interrupted, and makes nothing again that is already there
#   RANKS=2 scripts/quickstart.sh    fewer processes; four without this, or as many of 1, 2 and 4 as there are GPUs
#   INSTALL=no scripts/quickstart.sh with the packages of the active Python; nothing is installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/environment.sh all
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
ranks=${RANKS:-$((gpus == 0 || gpus > 3 ? 4 : gpus == 1 ? 1 : 2))}
work=runs/quickstart
config=(configs/runs/quickstart.toml)
[ "$ranks" -gt 1 ] || config+=(parallel.shard=1)
bold='' plain=''
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
say() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }

say "text: sources of this Python installation, split into training and held-out documents"
fsdp-data quickstart-corpus --out $work/text

say "tokenizer: byte-level BPE"
fsdp-data train-tokenizer $work/text/train.jsonl --kind bpe --vocab-size 2048 --out $work/tokenizer

say "token shards, validated"
fsdp-data prepare $work/text/train.jsonl --tokenizer $work/tokenizer --out $work/corpus --overwrite
fsdp-data prepare $work/text/heldout.jsonl --tokenizer $work/tokenizer --out $work/heldout --overwrite
fsdp-data validate $work/corpus $work/heldout

say "plan"
fsdp-pretrain plan "${config[@]}" --world-size "$ranks"

say "train on $ranks rank(s) (starting this script again continues from the newest checkpoint)"
printf 'look at it from another terminal: %s watch %s/run\n' "$(command -v fsdp-pretrain)" "$work"
torchrun --nproc-per-node "$ranks" -m fsdp_pretrain.train "${config[@]}"

say "evaluate what is still due (the trainer started the rest during training)"
fsdp-eval watch $work/run --once --wait

say "complete"
fsdp-pretrain report $work/run
cat <<END
  open        $PWD/$work/run/report.html
  next        $([ "${INSTALL:-yes}" = no ] || echo ". .venv/bin/activate; ")fsdp-pretrain watch $work/run
END
