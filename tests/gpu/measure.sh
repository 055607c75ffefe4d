#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, step by step: see README.md beside this file.
#
#   tests/gpu/measure.sh [--dry-run] OUT [STEP...]      steps: tests profile:MODEL[@DTYPE] kernels worker served goodput goodput:mix colocation demo
#
# Each step logs to OUT/STEP.log, ends after its limit at the latest, and the rest goes on after one that failed; the exit code says
# whether one did. A step that is done (OUT/STEP.done) is not run again, so what was interrupted goes on. All results are in
# OUT/results.tar.gz at the end. --dry-run says what would run, and for how long, and runs nothing.
# PYTHON (python3) has the extras worker, estimate and test; GPU_TYPE is the GPU's word in workload files (from its name).
# DEVICE=cpu rehearses all of it without a GPU, with the small MODELS; what needs CUDA (kernels, shares) is left out then.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
is_dry=
if [ "${1:-}" = --dry-run ]; then
  is_dry=1
  shift
fi
out=$(realpath -m "${1:?where results go}")
shift
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
if [ "$device" = cuda ]; then
  gpu_type=${GPU_TYPE:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | awk '{print tolower($NF)}')}
  read -ra models <<< "${MODELS:-resnet50 mobilenet_v2 efficientnet_b7 vit_b_16 transformers/bert transformers/gpt2 transformers/t5}"
  batches=1,8,32,128 served_batches=8,32
  goodput_of=(resnet50) goodput_options=(--slos 25 50)
  mix_of=(resnet50 mobilenet_v2 efficientnet_b0 vit_b_16 transformers/bert) mix_options=(--slos 50 --ours tenuto)
  profile_options=(--max-batch 128 --shares "10,20,50" --igniter)
else
  gpu_type=${GPU_TYPE:-$device}
  read -ra models <<< "${MODELS:-resnet18 squeezenet1_1}"
  batches=1,2 served_batches=2
  goodput_of=(squeezenet1_1) goodput_options=(--slos 1000 --max-batch 2 --window 2)
  mix_of=("${models[@]}") mix_options=(--slos 2000 --max-batch 2 --window 2 --ours tenuto)
  profile_options=(--max-batch 2 --seconds 0.2)
fi
steps=("$@")
if [ ${#steps[@]} -eq 0 ]; then
  steps=(tests "${models[@]/#/profile:}" kernels worker served goodput goodput:mix colocation demo)
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

profile_of() { echo "$out/profiles/${1##*/}-$gpu_type.json"; }
log_of() { echo "$out/${1//\//-}.log"; }
done_of() { echo "$out/${1//\//-}.done"; }

# Seconds: after so long a step is ended.
limit_of() {
  case $1 in
    tests | worker) echo 600 ;;
    kernels) echo 900 ;;
    goodput*) echo 480 ;;
    profile:* | colocation) echo 300 ;;
    *) echo 120 ;;
  esac
}

step() {
  local run=(timeout --kill-after=10 "$(limit_of "$1")" "$python" -m)
  case $1 in
    tests)
      "${run[@]}" pytest -p no:cacheprovider tests/gpu ;;
    profile:*)
      local model=${1#profile:} dtype=()
      case $model in *@*) dtype=(--dtype "${model#*@}") ;; esac
      "${run[@]}" roles.cli profile "${model%@*}" "${dtype[@]}" --device "$device" --gpu-type "$gpu_type" "${profile_options[@]}" \
        --out "$(profile_of "$model")" ;;
    kernels)
      "${run[@]}" roles.cli profile --device "$device" --kernels --gpu-type "$gpu_type" --out "$out/profiles/$gpu_type-kernels.csv.gz" ;;
    worker)
      local failed=0
      for model in "${models[@]}"; do
        local zoo=torchvision
        case $model in transformers/*) zoo=transformers ;; esac
        "${run[@]}" benchmarks.worker_throughput --device "$device" --zoo $zoo --arch "${model##*/}" \
          --batches "$batches" --json "$out/worker-${model##*/}.json" || failed=1
      done
      return $failed ;;
    served)
      "${run[@]}" benchmarks.served_throughput --device "$device" --arch "${models[0]}" --batches "$served_batches" \
        --json "$out/served.json" ;;
    goodput | goodput:mix)
      local served=("${goodput_of[@]}" "${goodput_options[@]}")
      if [ "$1" = goodput:mix ]; then served=("${mix_of[@]}" "${mix_options[@]}"); fi
      "${run[@]}" benchmarks.peers --peers mosec litserve --settings 2 --ours tenuto "tenuto, HTTP" --warmup 1 --window 4 --repeat 1 \
        --precision 0.05 --device "$device" --json "$out/${1/:/-}.json" --models "${served[@]}" ;;
    colocation)
      "${run[@]}" benchmarks.colocation "$(profile_of resnet50)" "$(profile_of transformers/bert)" \
        --json "$out/colocation.json" ;;
    demo)
      time "${run[@]}" roles.cli demo ;;
    *)
      echo "there is no step $1" >&2
      return 2 ;;
  esac
}

mkdir -p "$out/profiles"
code=0
for name in "${steps[@]}"; do
  if [ -e "$(done_of "$name")" ]; then
    echo "done    $name"
  elif [ "$device" != cuda ] && [[ $name = kernels || $name = colocation ]]; then
    echo "left    $name: it needs CUDA"
  elif [ -n "$is_dry" ]; then
    echo "to run  $name: at most $(($(limit_of "$name") / 60)) min"
  else
    if step "$name" > "$(log_of "$name")" 2>&1; then
      echo "ok      $name"
      touch "$(done_of "$name")"
    else
      echo "FAILED  $name"
      code=1
    fi
    tail -n 15 "$(log_of "$name")" | sed 's/^/        /'
  fi
done
if [ -z "$is_dry" ]; then
  (cd "$out" && tar --create --gzip --file results.tar.gz --exclude results.tar.gz -- *)
fi
exit $code
