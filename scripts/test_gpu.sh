#!/usr/bin/env bash
# The GPU suite and the benchmarks on this machine, in under nine minutes. Every part has a time limit, and none ends
# another. Installs nothing: the active Python (or PYTHON=...) needs torch with CUDA, the rest of the extra `train`, and
# pytest, for example by PYTHONPATH; neither aim nor lm-eval. transformers is compared with if present.
#
#   scripts/test_gpu.sh [OUTDIR]             everything; JSON files, logs and summary.md in OUTDIR or a temporary directory
#   scripts/test_gpu.sh --list               the parts, the most valuable first, and their limits in seconds
#   scripts/test_gpu.sh --only suite,peers-7b [OUTDIR]
#   scripts/test_gpu.sh --minutes 4 [OUTDIR] what does not fit any more is not started
#   scripts/test_gpu.sh --dry [OUTDIR]       all parts with toys, on any machine
set -euo pipefail

only= minutes=8.5 dry= list= out=
while [ $# -gt 0 ]; do
    case $1 in
        --only) only=$2; shift ;;
        --minutes) minutes=$2; shift ;;
        --dry) dry=yes ;;
        --list) list=yes ;;
        -*) echo "error: unknown option $1; see the head of ${BASH_SOURCE[0]}" >&2; exit 78 ;;
        *) out=$1 ;;
    esac
    shift
done
[[ $minutes =~ ^[0-9]+(\.[0-9]+)?$ ]] || { echo "error: --minutes $minutes is not a number" >&2; exit 78; }
out=$(realpath -m "${out:-${TMPDIR:-/tmp}/test-gpu-$$}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
INSTALL=no
. scripts/environment.sh train

names=() limits=() commands=()
part() {  # NAME LIMIT COMMAND...: add a part
    names+=("$1") limits+=("$2")
    shift 2
    commands+=("$(printf '%q ' "$@")")
}

toy=()  # overrides that make every configuration tiny
[ -z "$dry" ] || toy=(model.layers=1 model.hidden=32 model.heads=2 model.ffn=64 model.vocab=128 model.kv_heads=1
    data.sequence_length=16 train.micro_batch=2 "train.global_batch=4 samples" train.precision=fp32
    parallel.compile=false)
bench() {  # NAME LIMIT CONFIG [OVERRIDE or OPTION ...]: add a benchmark
    local name=$1 limit=$2 config=configs/bench/$3-gpu.toml counts=(--steps 8 --warmup 4)
    shift 3
    [ -z "$dry" ] || counts=(--steps 1 --warmup 1 --rounds 1)
    part "$name" "$limit" -m fsdp_pretrain.bench "$config" "$@" "${toy[@]}" "${counts[@]}" --result "$out/$name.json"
}
tests=(-v --tb=short -o timeout=150)
# The tests mostly wait for processes they have started. More of them at once might not fit on the device.
! "$python" -c "import xdist" > /dev/null 2>&1 || tests+=(--numprocesses=3 --dist=worksteal)
[ -z "$dry" ] || tests=(--collect-only --quiet)
documents=data.attention=document eager=parallel.compile=false
whole=(--fake-ranks 8 --accumulation 2 model.layers=32 model.declared_params=6_738_415_616)  # all of it, one rank of 8

part suite 300 -m pytest -m gpu tests/gpu "${tests[@]}"
bench peers-7b 190 llama-7b-layers --peers --rounds 2 --limit 90
bench 7b-rank 70 llama-7b-layers "${whole[@]}"
bench 7b-rank-float8 70 llama-7b-layers "${whole[@]}" train.precision=bf16+fp8
bench 7b-trace 60 llama-7b-layers --trace "$out/7b.json.gz"
bench 7b-document 60 llama-7b-layers $documents
bench saves 110 saves --saves "$out/scratch" --rounds 1
bench 7b-eager 45 llama-7b-layers $eager
bench 7b-8k 45 llama-7b-layers data.sequence_length=8192 train.micro_batch=1 "train.global_batch=4 samples"
bench 1b 60 llama-1b
bench 7b-2k 45 llama-7b-layers data.sequence_length=2048 train.micro_batch=4 "train.global_batch=16 samples"
bench 7b-document-8k 45 llama-7b-layers $documents data.sequence_length=8192 train.micro_batch=1 \
    "train.global_batch=4 samples"
bench 1b-document 45 llama-1b $documents
bench 1b-eager 45 llama-1b $eager
bench 1b-8k 45 llama-1b data.sequence_length=8192 train.micro_batch=2 "train.global_batch=4 samples"
bench 1b-2k 45 llama-1b data.sequence_length=2048 train.micro_batch=8 "train.global_batch=16 samples"
bench peers-1b 150 llama-1b --peers --rounds 2 --limit 70

for name in ${only//,/ }; do
    [[ " ${names[*]} " == *" $name "* ]] || { echo "error: --only $only: the parts are ${names[*]}" >&2; exit 78; }
done
if [ -n "$list" ]; then
    for number in "${!names[@]}"; do printf '%-16s %ss\n' "${names[number]}" "${limits[number]}"; done
    exit 0
fi

lacks=$("$python" -c "from importlib.util import find_spec
names = 'numpy prometheus_client psutil pyarrow pydantic rich sentencepiece tokenizers tomli_w tqdm xxhash zstandard torch'
print(*(name for name in [*names.split(), 'torchdata', 'safetensors', 'pytest'] if find_spec(name) is None))")
if [ -n "$lacks" ]; then
    echo "error: $python lacks $lacks" >&2
    echo "  remedy: install the extra train and pytest, or name a folder with them in PYTHONPATH" >&2
    exit 78
fi
mkdir -p "$out"
summary=$out/summary.md
echo "results: $out" >&2
device=$("$python" -c "import torch; gpu = torch.cuda.is_available()
print(torch.cuda.get_device_name() if gpu else 'cpu', 'torch', torch.__version__)")
if [[ $device = cpu* ]] && [ -z "$dry" ] && [ "$only" != suite ]; then
    echo "error: there is no GPU here for the benchmarks: --dry runs all parts with toys" >&2
    exit 78
fi
echo "# $([ -z "$dry" ] && echo "GPU suite and benchmarks" || echo "Dry run: toys, no figures to quote"): $device," \
    "$(date '+%Y-%m-%d %H:%M:%S %z')" > "$summary"
seconds=$(awk "BEGIN {print int(60 * $minutes)}") ended=0 running=
set -m  # a process group for each part; without it, parts would ignore SIGINT
trap '[ -z "$running" ] || kill -INT "$running"; ended=1 seconds=0' INT TERM
for number in "${!names[@]}"; do
    name=${names[number]} limit=${limits[number]}
    [ -z "$only" ] || [[ ",$only," == *",$name,"* ]] || continue
    left=$((seconds - SECONDS)) began=$SECONDS
    if [ "$left" -lt 5 ]; then
        result="not started"
    else
        # A part gets five seconds to print what it has: pytest shows its failures, `--peers` its rounds.
        eval "command=(${commands[number]})"
        timeout --signal=INT --kill-after=5 $((limit < left ? limit : left)) "$python" "${command[@]}" \
            > "$out/$name.txt" 2> "$out/$name.log" &
        running=$!
        while :; do  # a signal ends a wait
            wait "$running" && code=0 || code=$?
            kill -0 "$running" 2> /dev/null || break
        done
        kill -KILL -- "-$running" 2> /dev/null || true
        running=
        case $code in
            0) result=passed ;;
            124 | 137) result="timed out" ended=1 ;;
            *) result="failed (exit $code)" ended=1 ;;
        esac
        rm -rf "$out/scratch"
    fi
    {
        echo
        echo "## $name: $result, $((SECONDS - began)) s"
        [ "$result" = "not started" ] || tail -n 40 "$out/$name.txt" | sed 's/^/    /'
        [ "$result" = passed ] || [ "$result" = "not started" ] || tail -n 20 "$out/$name.log" | sed 's/^/    /'
    } >> "$summary"
    echo "$name: $result, $((SECONDS - began)) s" >&2
done
cat "$summary"
exit $ended
