#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, step by step: see README.md beside this file.
#
#   tests/gpu/measure.sh [--dry-run] OUT [STEP...]      steps: tests profile:MODEL[@DTYPE] kernels worker served colocation demo
#
# Each step logs to OUT/STEP.log, ends after its limit at the latest, and the rest goes on after one that failed; the exit code says
# whether one did. A step that is done (OUT/STEP.done) is not run again, so what was interrupted goes on. All results are in
# OUT/results.tar.gz at the end. --dry-run says what would run, and for how long, and runs nothing.
# PYTHON (python3) has the extras worker, estimate and test; GPU_TYPE is the GPU's word in workload files (from its name).
# DEVICE=stand-in rehearses all of it without a GPU, on the stand-ins of CUDA, NVML and MPS, with small models: no figure means anything then.
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
device=cuda kernels_device=cuda
if [ "${DEVICE:-cuda}" = stand-in ]; then
  # The second GPU has little memory, so its operators are small.
  gpu_type=stand-in kernels_device=cuda:1
  models=(deploy.local.demo.digits_model:Digits) zoo_models=(squeezenet1_1)
  batches=1,2 served_batches=2
  profile_options=(--max-batch 2 --shares "10,50" --igniter --seconds 0.2)
  worker_options=(--turns 5) served_options=(--seconds 1 --turns 5)
  colocated=("${models[0]}" "${models[0]}") colocation_options=(--batches 1 --seconds 0.2)
  stand_ins=$PWD/tests/stand_ins
  export PATH=$stand_ins:$PATH TENUTO_STAND_IN_NVML=$out/gpus.json
  PYTHONPATH=$stand_ins/cuda:$stand_ins/nvml${PYTHONPATH:+:$PYTHONPATH}
else
  gpu_type=${GPU_TYPE:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | awk '{print tolower($NF)}')}
  read -ra models <<< "${MODELS:-resnet50 mobilenet_v2 efficientnet_b7 vit_b_16 transformers/bert transformers/gpt2 transformers/t5}"
  zoo_models=("${models[@]}")
  batches=1,8,32,128 served_batches=8,32
  profile_options=(--max-batch 128 --shares "10,20,50" --igniter)
  worker_options=() served_options=()
  colocated=(resnet50 transformers/bert) colocation_options=()
fi
steps=("$@")
if [ ${#steps[@]} -eq 0 ]; then
  steps=(tests "${models[@]/#/profile:}" kernels worker served colocation demo)
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
      "${run[@]}" roles.cli profile --device "$kernels_device" --kernels --gpu-type "$gpu_type" --out "$out/profiles/$gpu_type-kernels.csv.gz" ;;
    worker)
      local failed=0
      for model in "${zoo_models[@]}"; do
        local zoo=torchvision
        case $model in transformers/*) zoo=transformers ;; esac
        "${run[@]}" benchmarks.worker_throughput --device "$device" --zoo $zoo --arch "${model##*/}" \
          --batches "$batches" "${worker_options[@]}" --json "$out/worker-${model##*/}.json" || failed=1
      done
      return $failed ;;
    served)
      "${run[@]}" benchmarks.served_throughput --device "$device" --arch "${zoo_models[0]}" --batches "$served_batches" \
        "${served_options[@]}" \
        --json "$out/served.json" ;;
    colocation)
      "${run[@]}" benchmarks.colocation "$(profile_of "${colocated[0]}")" "$(profile_of "${colocated[1]}")" "${colocation_options[@]}" \
        --json "$out/colocation.json" ;;
    demo)
      time "${run[@]}" roles.cli demo ;;
    *)
      echo "there is no step $1" >&2
      return 2 ;;
  esac
}

mkdir -p "$out/profiles"
if [ "${DEVICE:-}" = stand-in ] && [ -z "$is_dry" ]; then
  "$python" -m tests.gpu_stand_ins "$out/gpus.json"
fi
code=0
for name in "${steps[@]}"; do
  if [ -e "$(done_of "$name")" ]; then
    echo "done    $name"
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
