#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, step by step: see README.md beside this file.
#
#   tests/gpu/measure.sh OUT [STEP...]      steps: tests profile:MODEL kernels worker served colocation demo
#
# Each step logs to OUT/STEP.log and the rest goes on after one that failed; the exit code says whether one did.
# PYTHON (python3) has the extras worker, estimate and test; GPU_TYPE is the GPU's word in workload files (from its name).
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
out=$(realpath -m "${1:?where results go}")
shift
python=${PYTHON:-python3}
gpu_type=${GPU_TYPE:-$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | awk '{print tolower($NF)}')}
models=(resnet50 mobilenet_v2 efficientnet_b7 transformers/bert transformers/gpt2)
steps=("$@")
if [ ${#steps[@]} -eq 0 ]; then
  steps=(tests "${models[@]/#/profile:}" kernels worker served colocation demo)
fi
mkdir -p "$out/profiles"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

profile_of() { echo "$out/profiles/${1##*/}-$gpu_type.json"; }

step() {
  case $1 in
    tests)
      "$python" -m pytest -p no:cacheprovider tests/gpu ;;
    profile:*)
      local model=${1#profile:}
      "$python" -m roles.cli profile "$model" --device cuda --gpu-type "$gpu_type" --max-batch 128 \
        --shares 10,20,50 --igniter --out "$(profile_of "$model")" ;;
    kernels)
      "$python" -m roles.cli profile --device cuda --kernels --gpu-type "$gpu_type" --out "$out/profiles/$gpu_type-kernels.csv.gz" ;;
    worker)
      local failed=0
      for model in "${models[@]}"; do
        local zoo=torchvision
        case $model in transformers/*) zoo=transformers ;; esac
        "$python" -m benchmarks.worker_throughput --device cuda --zoo $zoo --arch "${model##*/}" \
          --batches 1,8,32,128 --json "$out/worker-${model##*/}.json" || failed=1
      done
      return $failed ;;
    served)
      "$python" -m benchmarks.served_throughput --device cuda --arch resnet50 --batches 8,32 --json "$out/served.json" ;;
    colocation)
      "$python" -m benchmarks.colocation "$(profile_of resnet50)" "$(profile_of transformers/bert)" \
        --json "$out/colocation.json" ;;
    demo)
      time "$python" -m roles.cli demo ;;
    *)
      echo "there is no step $1" >&2
      return 2 ;;
  esac
}

code=0
for name in "${steps[@]}"; do
  if step "$name" > "$out/${name//\//-}.log" 2>&1; then
    echo "ok      $name"
  else
    echo "FAILED  $name"
    code=1
  fi
  tail -n 15 "$out/${name//\//-}.log" | sed 's/^/        /'
done
exit $code
