#!/usr/bin/env bash
# Runs a Spark standalone cluster on this machine: a master and workers, all on loopback.
#
#   cluster.sh start [--workers 2] [--cores 1] [--memory 1g]   prints the master's URL
#   cluster.sh url | status | stop
#
# The system chooses the ports. CLUSTER_DIR (default: polywire-spark-cluster-UID in the temporary directory) contains process ids,
# logs and the executors' folders. PYTHON is the Python with pyspark and polywire (default: python3).
set -euo pipefail

PYTHON=${PYTHON:-python3}
CLUSTER_DIR=${CLUSTER_DIR:-${TMPDIR:-/tmp}/polywire-spark-cluster-$(id -u)}
START_SECONDS_MAX=90

fail() {
    echo "cluster.sh: $*" >&2
    exit 1
}

prepare() {
    SPARK_HOME=$("$PYTHON" -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent)') || fail "$PYTHON has no pyspark"
    JAVA_HOME=$("$PYTHON" -c 'from polywire.spark.java import find_java; print(find_java().home)') || fail "no Java, or $PYTHON has no polywire"
    export SPARK_HOME JAVA_HOME SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON=${PYSPARK_PYTHON:-$PYTHON}
    # Spark's scripts read these variables, so that Spark writes only below CLUSTER_DIR.
    export SPARK_LOG_DIR=$CLUSTER_DIR SPARK_WORKER_DIR=$CLUSTER_DIR/executors SPARK_LOCAL_DIRS=$CLUSTER_DIR/scratch
}

# launch NAME CLASS ARGUMENT…: start a process in the background and write its id to NAME.pid.
launch() {
    local name=$1
    shift
    nohup "$SPARK_HOME/bin/spark-class" "$@" >"$CLUSTER_DIR/$name.log" 2>&1 </dev/null &
    echo $! >"$CLUSTER_DIR/$name.pid"
}

# waiting NAME PATTERN: wait until the process's log matches, and print the match.
waiting() {
    local found deadline=$((SECONDS + START_SECONDS_MAX))
    until found=$(grep -om1 "$2" "$CLUSTER_DIR/$1.log"); do
        alive "$1" || { tail -n 20 "$CLUSTER_DIR/$1.log" >&2; fail "$1 ended"; }
        [ $SECONDS -lt $deadline ] || fail "$1 did not start within $START_SECONDS_MAX s"
        sleep 0.1
    done
    echo "$found"
}

alive() {
    [ -f "$CLUSTER_DIR/$1.pid" ] && kill -0 "$(cat "$CLUSTER_DIR/$1.pid")" 2>/dev/null
}

names() {
    local file
    for file in "$CLUSTER_DIR"/*.pid; do
        [ -e "$file" ] && basename "$file" .pid
    done
    return 0
}

start() {
    local workers=2 cores=1 memory=1g number
    while [ $# -gt 0 ]; do
        case $1 in
            --workers) workers=$2 ;;
            --cores) cores=$2 ;;
            --memory) memory=$2 ;;
            *) fail "unknown option $1" ;;
        esac
        shift 2
    done
    ! alive master || fail "the cluster is already running: $(url)"
    mkdir -p "$CLUSTER_DIR"
    rm -f "$CLUSTER_DIR"/*.pid "$CLUSTER_DIR"/*.log "$CLUSTER_DIR/url"
    prepare
    launch master org.apache.spark.deploy.master.Master --host 127.0.0.1 --port 0 --webui-port 0
    waiting master 'spark://127\.0\.0\.1:[0-9]*' >"$CLUSTER_DIR/url"
    for number in $(seq "$workers"); do
        launch "worker-$number" org.apache.spark.deploy.worker.Worker --host 127.0.0.1 --port 0 --webui-port 0 \
            --cores "$cores" --memory "$memory" --work-dir "$CLUSTER_DIR/executors-$number" "$(cat "$CLUSTER_DIR/url")"
    done
    for number in $(seq "$workers"); do
        waiting "worker-$number" 'Successfully registered with master' >/dev/null
    done
    url
}

url() {
    [ -f "$CLUSTER_DIR/url" ] || fail "the cluster is not running"
    cat "$CLUSTER_DIR/url"
}

status() {
    local name
    for name in $(names); do
        if alive "$name"; then echo "$name runs pid=$(cat "$CLUSTER_DIR/$name.pid")"; else echo "$name has ended"; fi
    done
}

stop() {
    local name
    for name in $(names | sort -r); do
        alive "$name" && kill "$(cat "$CLUSTER_DIR/$name.pid")"
        rm -f "$CLUSTER_DIR/$name.pid"
    done
    rm -f "$CLUSTER_DIR/url"
}

command=${1:-}
[ $# -gt 0 ] && shift
case $command in
    start) start "$@" ;;
    url | status | stop) "$command" ;;
    *) fail "usage: cluster.sh start [--workers N] [--cores N] [--memory SIZE] | url | status | stop" ;;
esac
