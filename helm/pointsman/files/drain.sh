#!/bin/bash
# Envoy's preStop hook: accept no more, and return when nothing is in flight; it ends no process.
#
#   drain.sh ADMIN_PORT SETTLE_SECONDS LIMIT_SECONDS
#
# For SETTLE_SECONDS Envoy goes on accepting, because the cluster's load balancers still send; each
# answer asks its client to close. Then the listener closes, and requests in flight have until
# LIMIT_SECONDS after that. A client that was silent so far keeps a connection and has not been told:
# its next request would meet Envoy's end. So it is over once no connection is left, or once nothing
# has come on those for another SETTLE_SECONDS. Envoy's image has bash and no HTTP client.
set -u
port=$1 settle=$2 limit=$3
mark=${POINTSMAN_RUN:-/run/pointsman}/draining

ask() { # METHOD PATH
  {
    printf '%s %s HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
  } 3<>"/dev/tcp/127.0.0.1/$port"
}

# "CONNECTIONS IN_FLIGHT REQUESTS_SO_FAR" of clients; nothing once Envoy is gone.
clients() {
  ask GET '/stats?filter=^http.ingress.downstream_(cx_active|rq_active|rq_total)$' |
    sed -n 's/^http\.ingress\.downstream_[a-z_]*: \([0-9]*\).*/\1/p' | tr '\n' ' '
}

# The sidecar's own hook waits for as long as the mark is there.
: >"$mark"
trap 'rm -f "$mark"' EXIT
# Only the listener for clients: those inside go on serving what is in flight.
ask POST '/drain_listeners?inboundonly&graceful' >/dev/null || exit 0
sleep "$settle"
end=$((SECONDS + limit)) quiet_since=$SECONDS last=
while [ "$SECONDS" -lt "$end" ]; do
  read -r connections in_flight requests < <(clients; echo)
  [ "${connections:-0}" -gt 0 ] || exit 0
  if [ "$in_flight" -gt 0 ] || [ "$requests" != "$last" ]; then
    quiet_since=$SECONDS last=$requests
  fi
  [ $((SECONDS - quiet_since)) -lt "$settle" ] || exit 0
  sleep 0.2
done
