#!/usr/bin/env bash
# Wheels for a machine with a GPU that has PyTorch and Python 3.12 but no index to install from, into a folder to copy there.
#
#   tests/gpu/wheels.sh FOLDER [PACKAGE...]      by default what images with PyTorch mostly lack of the core and of `plan`, and two peers
#
# There: python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl; export PYTHONPATH=SITE
set -euo pipefail
folder=${1:?where wheels go}
shift
packages=("$@")
if [ ${#packages[@]} -eq 0 ]; then
  packages=(pyzmq msgspec sortedcontainers 'pulp<4' 'highspy<1.16' nvidia-ml-py)
  # The peers of the step `goodput`, as in benchmarks/peers/catalog.py, with what they need.
  packages+=(mosec==0.9.8 defspec offapi litserve==0.2.19 fastapi starlette pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection)
  packages+=(annotated-doc typing-extensions opentelemetry-api uvicorn h11 httptools uvloop anyio idna)
fi
platforms=()
for version in 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
  platforms+=(--platform "manylinux_${version}_x86_64")
done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 \
  --dest "$folder" "${packages[@]}"
du --summarize --bytes "$folder" | awk '{printf "%.1f MiB\n", $1 / 1048576}'
