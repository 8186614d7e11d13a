#!/bin/bash
# Envoy's preStop hook: accept no more, and return when nothing is in flight; it ends no process.
#
#   drain.sh ADMIN_PORT SETTLE_SECONDS LIMIT_SECONDS
#
# For SETTLE_SECONDS Envoy goes on accepting, because the cluster's load balancers still send; each
# answer asks its client to close. Then the listener closes, and requests in flight have until
# LIMIT_SECONDS after that. Envoy's image has bash and no HTTP client.
set -u
port=$1 settle=$2 limit=$3
mark=${POINTSMAN_RUN:-/run/pointsman}/draining

ask() { # METHOD PATH
  {
    printf '%s %s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
  } 3<>"/dev/tcp/127.0.0.1/$port"
}

# Requests in flight, one a line; none once Envoy is gone.
in_flight() {
  ask GET '/stats?filter=^http.ingress.downstream_rq_active$' |
    sed -n 's/^http\.ingress\.downstream_rq_active: \([1-9][0-9]*\).*/\1/p'
}

# The sidecar's own hook waits for as long as the mark is there.
: >"$mark"
trap 'rm -f "$mark"' EXIT
# Only the listener for clients: those inside go on serving what is in flight.
ask POST '/drain_listeners?inboundonly&graceful' >/dev/null || exit 0
sleep "$settle"
end=$((SECONDS + limit))
while [ -n "$(in_flight)" ] && [ "$SECONDS" -lt "$end" ]; do
  sleep 0.2
done
