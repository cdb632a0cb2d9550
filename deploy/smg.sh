#!/bin/sh
# One address before several servers of one model: pip install -r deploy/smg.txt, then
#   deploy/smg.sh http://10.0.0.1:8000 http://10.0.0.2:8000
# What follows the addresses is passed to `smg launch`. A server that is not there yet is asked again for some minutes.
# From the environment:
#   HOST, PORT     where the router listens (127.0.0.1, 8080)
#   METRICS_PORT   where its own Prometheus metrics are (29000)
#   KEY            the servers' API key, if they have one; clients send the same one
#   SMG            the program (smg)
if [ $# -eq 0 ]; then
    echo "smg.sh: no servers; name their addresses: deploy/smg.sh http://10.0.0.1:8000 http://10.0.0.2:8000" >&2
    exit 2
fi
# A health check every 2 s: what is drained or dead gets no first tries after two of them. Until then a request that meets
# a closed port or a 503 is tried again on another server.
exec "${SMG:-smg}" launch \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8080}" \
    --prometheus-host "${HOST:-127.0.0.1}" --prometheus-port "${METRICS_PORT:-29000}" \
    --policy cache_aware --health-check-interval-secs 2 --health-failure-threshold 2 \
    --disable-tokenizer-autoload --history-backend none ${KEY:+--api-key "$KEY"} \
    --worker-urls "$@"
