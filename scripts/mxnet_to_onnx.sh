#!/usr/bin/env bash
# Writes an MXNet model as ONNX, by MXNet's own exporter, for finecast to convert.
#
#   scripts/mxnet_to_onnx.sh NAME-symbol.json NAME-0000.params 8,3,224,224 OUT.onnx
#
# MXNet is retired: its last release needs numpy 1.23.5, which finecast does not run with, so it
# has an environment of its own: .venv-mxnet here, or $MXNET_VENV. The inputs' shapes are
# separated by semicolons, where there are several inputs.
set -euo pipefail
[ $# -eq 4 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
venv=${MXNET_VENV:-$(cd "$(dirname "$0")/.." && pwd)/.venv-mxnet}
if ! [ -e "$venv/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet \
    'mxnet==1.9.1' 'numpy==1.23.5' 'onnx==1.14.1'
  touch "$venv/.installed"
fi
exec "$venv/bin/python" -c '
import sys

import mxnet

symbol, parameters, shapes, output = sys.argv[1:]
sizes = [tuple(int(n) for n in one.split(",")) for one in shapes.split(";")]
mxnet.onnx.export_model(symbol, parameters, sizes, "float32", output)
' "$@"
