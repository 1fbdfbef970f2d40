#!/usr/bin/env bash
# Runs one experiment as N jax.distributed processes on this machine.
#
#   launch/local.sh -n 4 quickstart [overrides and options of `megascale train`]
#
# Every process gets MEGASCALE_COORDINATOR, MEGASCALE_NUM_PROCESSES and MEGASCALE_PROCESS_ID. Process 0 writes to the
# terminal, the others to log files. Ctrl-C and SIGTERM reach all of them, so that each finishes its step and saves; the
# third signal kills. Whichever process comes first starts the run's keeper of checkpoints, in a session of its own: it outlives this
# script and all processes, holds their newest states in memory for the next start, and ends by itself (`megascale keep --help`). When one fails, the others are ended, its last lines are shown, and its exit code is ours.
#
# MEGASCALE_COMMAND   what to run instead of `megascale train`, words separated by spaces
# MEGASCALE_GRACE_S   seconds that the others have to end by themselves after a failure (15)
set -euo pipefail

usage="usage: launch/local.sh -n PROCESSES EXPERIMENT [OVERRIDES...]"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
processes=
while getopts ":n:" option; do
    case $option in
        n) processes=$OPTARG ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
if [[ ! $processes =~ ^[1-9][0-9]*$ || $# -eq 0 ]]; then
    echo "-n ${processes:-is missing}: expected a number of processes and an experiment; $usage" >&2
    exit 2
fi
grace_s=${MEGASCALE_GRACE_S:-15}

if [[ -n ${MEGASCALE_COMMAND:-} ]]; then
    read -r -a command <<<"$MEGASCALE_COMMAND"
elif [[ -x $root/.venv/bin/megascale ]]; then
    command=("$root/.venv/bin/megascale" train)
elif [[ -n $(command -v megascale) ]]; then
    command=(megascale train)
else
    echo "no megascale command in $root/.venv or on PATH; run \`make train\` once, or activate its environment" >&2
    exit 2
fi

# A port below the range that the kernel hands out to clients, so that nobody takes it between the probe and its use.
free_port() {
    local port
    for _ in {1..100}; do
        port=$((20000 + RANDOM % 12000))
        if ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            echo "$port"
            return
        fi
    done
    echo "no free port between 20000 and 32000 on 127.0.0.1" >&2
    return 1
}

port=$(free_port)
export MEGASCALE_LAUNCHER="launch/local.sh -n $processes"
export MEGASCALE_COORDINATOR=127.0.0.1:$port MEGASCALE_NUM_PROCESSES=$processes
logs=$(mktemp -d "${TMPDIR:-/tmp}/megascale-local.XXXXXX")
mkfifo "$logs/ended"
exec {ended}<>"$logs/ended"
group_of=() # rank -> process group, of those that have not ended
groups=()   # every process group that was started
signals=0

# Signal $1 to every process that has not ended, and to what it started.
send() {
    local group
    for group in "${group_of[@]}"; do
        kill -s "$1" -- "-$group" 2>/dev/null || true
    done
}
# shellcheck disable=SC2329
forward() {
    signals=$((signals + 1))
    if [[ $signals -ge 3 ]]; then
        send KILL
        exit 130
    fi
    send "$1"
}
# shellcheck disable=SC2329
leave() {
    trap - EXIT INT TERM HUP
    group_of=("${groups[@]}")
    send KILL
}
trap leave EXIT
trap 'forward INT' INT
trap 'forward TERM' TERM
trap 'forward TERM' HUP

# Runs the command and reports `RANK CODE`. It outlives the signals that its command gets, in order to report.
# shellcheck disable=SC2016
report='trap : INT TERM HUP; "${@:2}"; echo "$MEGASCALE_PROCESS_ID $?" >&"$1"'
# Should this script be killed outright, the kernel ends the reporters, and then asks their commands to end.
outer=()
inner=()
if command -v setpriv >/dev/null; then
    outer=(setpriv --pdeathsig KILL)
    inner=(setpriv --pdeathsig TERM)
fi

# Job control gives every process a group of its own (the terminal's Ctrl-C then comes through `forward` alone) and
# leaves SIGINT as it is; without it a background process ignores SIGINT for good.
set -m
for ((rank = 0; rank < processes; rank++)); do
    export MEGASCALE_PROCESS_ID=$rank
    launched=("${outer[@]}" bash -c "$report" megascale "$ended" "${inner[@]}" "${command[@]}" "$@")
    if [[ $rank -eq 0 ]]; then
        "${launched[@]}" </dev/null &
    else
        "${launched[@]}" </dev/null >"$logs/process-$rank.log" 2>&1 &
    fi
    group_of[rank]=$!
    groups+=("$!")
    disown
done
set +m

# Sets `rank` and `status` of the next process that ended; fails after a second without one.
next_ended() {
    if read -r -t 1 -u "$ended" rank status; then return; fi
    for rank in "${!group_of[@]}"; do
        if ! kill -s 0 -- "-${group_of[rank]}" 2>/dev/null && ! read -r -t 0 -u "$ended"; then
            status=137 # ended without a report: its reporter was killed with it
            return
        fi
    done
    return 1
}

failed_rank=""
failed_status=0
deadline=0
while [[ ${#group_of[@]} -gt 0 ]]; do
    if [[ -n $failed_rank && $SECONDS -ge $deadline ]]; then break; fi # `leave` kills the rest
    if ! next_ended; then continue; fi
    unset "group_of[rank]"
    if [[ $status -ne 0 && -z $failed_rank ]]; then
        failed_rank=$rank
        failed_status=$status
        deadline=$((SECONDS + grace_s))
        echo "process $rank of $processes ended with code $status; ending the others" >&2
        send TERM
    fi
done

if [[ -z $failed_rank ]]; then
    rm -rf -- "$logs"
elif [[ $failed_rank -eq 0 ]]; then
    echo "logs of the other processes: $logs" >&2
else
    echo "--- last lines of process $failed_rank ($logs/process-$failed_rank.log)" >&2
    tail -n 20 -- "$logs/process-$failed_rank.log" >&2
fi
exit "$failed_status"
