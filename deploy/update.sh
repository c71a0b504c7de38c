#!/usr/bin/env bash
# Replaces the two replicas behind Caddy, one after the other, so that no request is lost. If the first
# does not become healthy, it stops, and the second serves on. It takes compose's arguments:
#   deploy/update.sh -f docker-compose.cpu.yml
set -euo pipefail
compose=(docker compose "$@" --profile https --profile second)
"${compose[@]}" build embedder
for service in embedder embedder-2; do
  "${compose[@]}" up --detach --no-deps --no-build --wait "$service"
done
