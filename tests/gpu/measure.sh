#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, step by step: see README.md beside this file.
#
#   tests/gpu/measure.sh [--dry-run] OUT [GROUP or STEP...]
#
#   groups   first second third fourth rest, each in the order of its worth; without any, all of them
#   steps    tests profile:MODEL[@DTYPE] kernels worker[:MODEL][@DTYPE] served copies colocation:MODEL,MODEL[,MODEL...] change load goodput[:SLO] goodput:mix demo
#
# Each step logs to OUT/STEP.log, ends after its limit at the latest, and the rest goes on after one that failed; the exit code says
# whether one did. A step that is done (OUT/STEP.done) is not run again, so what was interrupted goes on. OUT/packed has all results in
# at most eight files, from the first step on. --dry-run says what would run, and for how long, and runs nothing.
# MINUTES bounds all of it: a step that would hardly fit is left out, and one that has begun is ended.
# PYTHON (python3) has the extras worker, estimate and test; GPU_TYPE is the GPU's word in workload files (from its name).
# DEVICE=stand-in rehearses all of it without a GPU, on the stand-ins of CUDA, NVML and MPS, with small models: no figure means anything then.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
# What a step has to end in order, such as servers that it has started.
readonly KILL_AFTER_S=30
is_dry=
if [ "${1:-}" = --dry-run ]; then
  is_dry=1
  shift
fi
out=$(realpath -m "${1:?where results go}")
shift
python=${PYTHON:-python3}
device=cuda kernels_device=cuda stand_ins=
case ${DEVICE:-cuda} in
  cuda | stand-in) ;;
  *)
    echo "DEVICE is cuda (the first GPU: CUDA_VISIBLE_DEVICES chooses another) or stand-in, not $DEVICE" >&2
    exit 2 ;;
esac
if [ "${DEVICE:-cuda}" = stand-in ]; then
  stand_ins=$PWD/tests/stand_ins
  # The second GPU has little memory, so its operators are small.
  gpu_type=stand-in kernels_device=cuda:1
  models=(deploy.local.demo.digits_model:Digits) zoo_models=(squeezenet1_1 resnet18)
  profile_options=(--max-batch 2 --shares "10,50" --igniter --seconds 0.2)
  worker_options=(--batches "1,2" --rounds 1 --turns 5)
  served_options=(--batches 2 --seconds 1 --turns 5)
  copies_options=(--models "${zoo_models[0]}" --batch 2 --seconds 0.2)
  colocation_options=(--batches 1 --seconds 0.2)
  change_options=(--batch-max 2 --rate 4 --slo-ms 4000 --repeat 1 --quiet 2)
  load_options=(--batch-max 2 --slo-ms 4000 --seconds 1)
  goodput_of=("${zoo_models[0]}") goodput_slos=(1000) mix_of=("${zoo_models[@]}") mix_slo=2000 goodput_options=(--max-batch 2 --window 2)
  export PATH=$stand_ins:$PATH TENUTO_STAND_IN_NVML=$out/gpus.json
  PYTHONPATH=$stand_ins/cuda:$stand_ins/nvml${PYTHONPATH:+:$PYTHONPATH}
else
  gpu_type=${GPU_TYPE:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | awk '{print tolower($NF)}')}
  read -ra models <<< "${MODELS:-resnet50 transformers/bert mobilenet_v2 efficientnet_b7 vit_b_16 transformers/gpt2 transformers/t5}"
  read -ra zoo_models <<< "${MODELS:-resnet50 mobilenet_v2 resnet18 squeezenet1_1 efficientnet_b7 vit_b_16 transformers/bert}"
  profile_options=(--max-batch 128 --shares "10,20,50" --igniter)
  worker_options=(--batches "1,2,4,8,32,128")
  served_options=(--batches "8,32")
  copies_options=(--models "${models[0]},${models[1]:-${models[0]}}" --batch 32)
  colocation_options=(--batches "1,8,32")
  change_options=(--rate 150 --repeat 3 --quiet 4)
  load_options=(--seconds 3)
  goodput_of=(resnet50) goodput_slos=(25 50) goodput_options=(--window 4)
  mix_of=(resnet50 mobilenet_v2 efficientnet_b0 vit_b_16 transformers/bert) mix_slo=50
fi
# Co-located are those that have profiles; of the zoos' the first is served, changed and loaded.
zoo_one=${zoo_models[0]}
one=${models[0]} other=${models[1]:-${models[0]}} third=${models[2]:-${models[0]}}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

profile_of() { echo "$out/profiles/${1##*/}-$gpu_type.json"; }
log_of() { echo "$out/${1//\//-}.log"; }
done_of() { echo "$out/${1//\//-}.done"; }

# The steps of a group, and what a step needs before it. No name has a space in it.
steps_of() {
  case $1 in
    first) steps_of tests && steps_of "profile:$one" && printf 'worker:%s\n' "${zoo_models[@]:0:4}" && steps_of served && steps_of copies ;;
    second)
      if [ ${#zoo_models[@]} -gt 4 ]; then printf 'worker:%s\n' "${zoo_models[@]:4}"; fi
      printf '%s\n' change load "worker:$zoo_one@float16" ;;
    third) steps_of "colocation:$one,$other" && steps_of "colocation:$one,$other,$third" ;;
    fourth) steps_of goodput && echo goodput:mix ;;
    goodput) printf 'goodput:%s\n' "${goodput_slos[@]}" ;;
    rest) printf 'profile:%s\n' "${models[@]}" && printf '%s\n' kernels demo && steps_of worker@float16 ;;
    worker) printf 'worker:%s\n' "${zoo_models[@]}" ;;
    worker@*) printf "worker:%s@${1#*@}\n" "${zoo_models[@]}" ;;
    colocation:*)
      echo "${1#*:}" | tr , '\n' | sed 's/^/profile:/'
      echo "$1" ;;
    *) echo "$1" ;;
  esac
}

# Seconds that a step usually takes, and after which it is ended: estimates, until a machine has shown better ones.
times_of() {
  case $1 in
    tests) echo 180 300 ;;
    profile:*) echo 120 240 ;;
    kernels) echo 600 900 ;;
    worker:*) echo 30 120 ;;
    colocation:*) echo 150 300 ;;
    change) echo 120 300 ;;
    goodput:*) echo 240 480 ;;
    *) echo 60 180 ;;
  esac
}

about() { echo "about $((($1 + 30) / 60 > 0 ? ($1 + 30) / 60 : 1)) min"; }

# step NAME SECONDS: run it, for as long as that.
step() {
  local run=(timeout --kill-after=$KILL_AFTER_S "$2" "$python" -m) model=${1#*:} dtype=()
  if [ "$1" = served ]; then model=$zoo_one; fi
  case $model in *@*) dtype=(--dtype "${model#*@}") ;; esac
  local bare=${model%@*} zoo=torchvision
  case $bare in transformers/*) zoo=transformers ;; esac
  case $1 in
    tests)
      # Without CUDA all of them are skipped, which would look like success.
      if ! timeout --kill-after=10 60 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "torch finds no CUDA here"
        return 1
      fi
      "${run[@]}" pytest -p no:cacheprovider tests/gpu ;;
    profile:*)
      "${run[@]}" roles.cli profile "$bare" "${dtype[@]}" --device "$device" --gpu-type "$gpu_type" "${profile_options[@]}" \
        --out "$(profile_of "$model")" ;;
    kernels)
      "${run[@]}" roles.cli profile --device "$kernels_device" --kernels --gpu-type "$gpu_type" --out "$out/profiles/$gpu_type-kernels.csv.gz" ;;
    worker:*)
      "${run[@]}" benchmarks.worker_throughput --device "$device" --zoo $zoo --arch "${bare##*/}" "${dtype[@]}" "${worker_options[@]}" \
        --json "$out/worker-${model##*/}.json" ;;
    served)
      "${run[@]}" benchmarks.served_throughput --device "$device" --zoo $zoo --arch "${bare##*/}" "${served_options[@]}" --json "$out/served.json" ;;
    copies)
      "${run[@]}" benchmarks.device_copies --device "$device" "${copies_options[@]}" --timelines "$out" --json "$out/copies.json" ;;
    colocation:*@*)
      echo "profiles do not tell their dtype: models are co-located as float32 only" >&2
      return 2 ;;
    colocation:*)
      local names profiles=() name
      IFS=, read -ra names <<< "$model"
      for name in "${names[@]}"; do profiles+=("$(profile_of "$name")"); done
      "${run[@]}" benchmarks.colocation "${profiles[@]}" --device "$device" "${colocation_options[@]}" \
        --json "$out/${1//\//-}.json" ;;
    change)
      "${run[@]}" benchmarks.change_under_load --device "$device" --model "$zoo_one" "${change_options[@]}" --json "$out/change.json" ;;
    load)
      "${run[@]}" benchmarks.load_beside --device "$device" --serves "$zoo_one" --loads "$zoo_one" "${load_options[@]}" --json "$out/load.json" ;;
    goodput:*)
      # Of each peer the largest batch and half of it, and of one model alone the largest with two processes too.
      local served=("${goodput_of[@]}") slo=$model ours=(tenuto "tenuto, HTTP") settings=3
      if [ "$model" = mix ]; then served=("${mix_of[@]}") slo=$mix_slo ours=(tenuto) settings=2; fi
      "${run[@]}" benchmarks.peers --peers mosec litserve --settings $settings --warmup 1 --repeat 1 --precision 0.05 "${goodput_options[@]}" \
        --device "$device" --slos "$slo" --json "$out/${1//:/-}.json" --ours "${ours[@]}" --models "${served[@]}" ;;
    demo)
      time "${run[@]}" roles.cli demo ;;
    *)
      echo "there is no step $1" >&2
      return 2 ;;
  esac
}

# All in one file, beside it what is good to read alone: the end of each log in the order of their ends, and timelines.
pack() {
  mkdir -p "$out/packed"
  (cd "$out" && tar --create --gzip --file packed/results.tar.gz --exclude packed -- *)
  local log
  for log in $(cd "$out" && ls -tr -- *.log); do
    echo "== $([ -e "$out/${log%.log}.done" ] && echo ok || echo FAILED) ${log%.log}"
    tail -n 60 "$out/$log"
  done > "$out/packed/figures.txt"
  find "$out" -maxdepth 1 -name 'timeline-*.json.gz' | sort | head -n 6 | xargs --no-run-if-empty cp --target-directory "$out/packed"
}

groups=("$@")
if [ ${#groups[@]} -eq 0 ]; then
  groups=(first second third fourth rest)
fi
mapfile -t steps < <(for group in "${groups[@]}"; do steps_of "$group"; done | awk '!seen[$0]++')
until_s=$(awk "BEGIN {print int(60 * ${MINUTES:-1000000})}")
mkdir -p "$out/profiles"
if [ -n "$stand_ins" ] && [ -z "$is_dry" ]; then
  "$python" -m tests.gpu_stand_ins "$out/gpus.json"
fi
code=0 total_s=0 header=
for name in "${steps[@]}"; do
  read -r usual_s limit_s < <(times_of "$name")
  if [ -n "$stand_ins" ]; then limit_s=$((3 * limit_s)); fi # a rehearsal may share few cores with others
  # The last seconds are for a step that does not end at once, and for packing.
  left_s=$((until_s - SECONDS - KILL_AFTER_S - 20))
  if [ -e "$(done_of "$name")" ]; then
    echo "done    $name"
  elif [ -n "$is_dry" ]; then
    echo "to run  $name: $(about "$usual_s"), at most $((limit_s / 60))"
    total_s=$((total_s + usual_s))
  elif [ "$left_s" -lt $((usual_s / 2)) ]; then
    echo "left    $name: no time"
    code=1
  else
    header=${header:-$(timeout --kill-after=10 60 "$python" -m benchmarks.device "$device" 2>&1 | tail -n 1)}
    echo "$header" > "$(log_of "$name")"
    if step "$name" $((limit_s < left_s ? limit_s : left_s)) >> "$(log_of "$name")" 2>&1; then
      word=ok
      touch "$(done_of "$name")"
    else
      word=FAILED
      code=1
    fi
    printf '%-7s %s\n' $word "$name"
    tail -n 15 "$(log_of "$name")" | sed 's/^/        /'
    pack
  fi
done
if [ -n "$is_dry" ]; then
  echo "$(about "$total_s") in all"
fi
exit $code
