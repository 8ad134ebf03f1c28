#!/bin/bash
# Builds the null CUDA device in DIR (default $TMPDIR/nullcuda): build.sh [DIR]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); dir=${1:-${TMPDIR:-/tmp}/nullcuda}; mkdir -p "$dir"; dir=$(cd "$dir" && pwd)
for tool in gcc nm readelf; do command -v $tool >/dev/null || { echo "build.sh needs $tool (gcc and binutils)" >&2; exit 1; }; done
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "build.sh knows Linux on x86_64 only" >&2; exit 1; }

python=$dir/venv/bin/python
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }
# the wheel alone: no NVIDIA library (2.7 GB) is needed, the stubs stand in for all of them
pip install filelock 'typing-extensions>=4.10' 'setuptools<82' 'sympy>=1.13.3' networkx jinja2 fsspec numpy pytest pytest-timeout pytest-xdist hypothesis rich typer highspy ${NULLCUDA_PACKAGES:-}
pip install --no-deps torch==2.11.0
[ -d "$dir/headers/nvidia" ] || pip install --no-deps --target "$dir/headers" nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88
include=$dir/headers/nvidia/cu13/include
torch=$("$python" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("torch").origin).parent / "lib")')

# what torch asks of the CUDA libraries and null.c does not have: rest.c counts it by name
work=$dir/work; mkdir -p "$work"; rm -rf "$dir/lib"; mkdir -p "$dir/lib"
gcc -O2 -fPIC -w -I"$include" -c "$here/null.c" -o "$work/null.o"
nm --defined-only "$work/null.o" | awk '$2 == "T" {print $3}' | sort -u > "$work/have"
nm -D --undefined-only "$torch"/*.so | awk 'NF {print $NF}' | sed 's/@.*//' \
  | grep -E '^(__cuda|cu[A-Z]|cu(da|blas|dnn|sparse|solver|fft|rand|pti)|nccl|nvrtc|nvshmem|nvml)' | grep -v '^nvshmemi_' | sort -u > "$work/asked"
{ echo 'int nullcuda_rest(const char*);'
  comm -13 "$work/have" "$work/asked" | sed 's/.*/int &(void){return nullcuda_rest("&");}/'; } > "$work/rest.c"
gcc -O1 -fPIC -w -fno-builtin -c "$work/rest.c" -o "$work/rest.o"
gcc -shared -o "$dir/lib/libnullcuda.so" "$work/null.o" "$work/rest.o" -lpthread -ldl
readelf -d "$torch"/*.so | grep NEEDED | grep -oE 'lib(cu|nv|nccl)[^]]*' | sort -u | while read -r name; do ln -s libnullcuda.so "$dir/lib/$name"; done

cp "$here/nullcuda.py" "$dir/lib/"; cp "$here/nullcuda" "$dir/nullcuda"; chmod +x "$dir/nullcuda"
"$dir/nullcuda" python "$dir/lib/nullcuda.py"
echo "run: $dir/nullcuda python script.py"
