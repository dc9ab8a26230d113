#!/bin/sh
# Exchanges on emulated networks: what bench/results/net.csv holds. As root, or where user namespaces are allowed.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-bench/results/net.csv}
codecs='noise;int8;int4;gcomp:mode=lossless;gcomp;gcomp:ulps=256;gcomp:keep=7;cast;cast/allreduce;gcomp:mode=lossless/ring'
for shape in "4 1 1gbit" "4 1 2.5gbit" "2 2 1gbit"; do
    set -- $shape
    "$python" -m gradzip emulate --hosts "$1" --ranks-per-host "$2" --rate "$3" -- \
        "$python" -m gradzip bench net --codecs "$codecs" --csv "$out"
done
