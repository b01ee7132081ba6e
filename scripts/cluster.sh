#!/bin/sh
# Two Ray nodes on this machine: run a command beside them, and stop them at its end.
#
#     scripts/cluster.sh [-k SECONDS] COMMAND...
#
# With -k the second node is killed (SIGKILL) so many seconds after the command began.
# RAY names the ray command; its Python has finecast with the extra "cluster".
set -eu
RAY=${RAY:-ray}
kill_after=""
if [ "${1:-}" = "-k" ]; then
    kill_after=$2
    shift 2
fi
port=$((20000 + $$ % 20000))
folder=$(mktemp -d)

start() {
    # In the foreground: the node is this shell's child, and ends with it.
    "$RAY" start --block --num-cpus=2 --include-dashboard=false --temp-dir="$folder/ray" "$@" \
        >>"$folder/log" 2>&1 &
}

start --head --port="$port"
head=$!
second=""
finish() {
    kill $head $second 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap finish EXIT INT TERM

nodes() {
    RAY_ADDRESS=127.0.0.1:$port "$RAY" list nodes --format=json 2>/dev/null | grep -c ALIVE || true
}
