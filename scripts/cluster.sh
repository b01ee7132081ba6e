#!/bin/sh
# Runs a command beside two Ray nodes on this machine, and stops the nodes at its end. The first
# node has the resource "timing": races run there.
#
#     scripts/cluster.sh [-k SECONDS] finecast tune model.onnx ... --executor ray
#
# With -k the second node is killed (SIGKILL) so many seconds after the command began. The ray
# command has to be that of the Python which runs finecast (pip install 'finecast[cluster]').
set -eu
kill_after=""
if [ "${1:-}" = "-k" ]; then
    kill_after=$2
    shift 2
fi
port=$((20000 + $$ % 20000))
folder=$(mktemp -d)
# Beside other processes Ray gives its tasks the least of the processor (a niceness of 15), and
# ends them where the memory is full, to begin them again.
export RAY_worker_niceness=0 RAY_memory_monitor_refresh_ms=0

finish() {
    # The nodes' own processes end with them.
    kill "$head" "$second" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder"
}

started() {
    ray start --block --num-cpus=2 "$@" >>"$folder/log" 2>&1 &
}

started --head --port="$port" --include-dashboard=false --temp-dir="$folder/ray" \
    --resources='{"timing": 1}'
head=$!
second=$head
trap finish EXIT INT TERM

# Waits until so many nodes are there; a node that could not be started ends the script.
wait_for() {
    until [ "$(RAY_ADDRESS=127.0.0.1:$port ray status 2>/dev/null | grep -c ' node_')" -ge "$1" ]; do
        if ! kill -0 "$head" || ! kill -0 "$second"; then
            cat "$folder/log" >&2
            exit 1
        fi
        sleep 1
    done
}

wait_for 1
started --address="127.0.0.1:$port"
second=$!
wait_for 2
if [ -n "$kill_after" ]; then
    (sleep "$kill_after" && kill -KILL "$second") &
fi
RAY_ADDRESS=127.0.0.1:$port "$@"
