#!/usr/bin/env bash
# An image to a served model, by curl alone. Usage: docs/examples/curl.sh IMAGE [QUESTION]
#
# Reads OPENAI_BASE_URL (http://127.0.0.1:8000/v1), MODEL (epd-demo), OPENAI_API_KEY where the endpoint wants one.
set -euo pipefail

image=${1:?usage: curl.sh IMAGE [QUESTION]}
question=${2:-What is in the picture?}
quoted=${question//\\/\\\\} # as a JSON string
quoted=${quoted//\"/\\\"}
case ${image,,} in
    *.jpg | *.jpeg) type=image/jpeg ;;
    *.webp) type=image/webp ;;
    *.gif) type=image/gif ;;
    *) type=image/png ;;
esac

# The body goes through a pipe: an image is too long for an argument.
{
    printf '{"model": "%s", "max_tokens": 64, "temperature": 0, "messages": [{"role": "user", "content": [' "${MODEL:-epd-demo}"
    printf '{"type": "image_url", "image_url": {"url": "data:%s;base64,' "$type"
    base64 <"$image" | tr -d '\n'
    printf '"}}, {"type": "text", "text": "%s"}]}]}' "$quoted"
} | curl --silent --show-error --fail-with-body \
    -H 'Content-Type: application/json' -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" \
    --data-binary @- "${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}/chat/completions"
echo
