"""An image to a served model, and its answer whole and streamed, by the `openai` package.

    python docs/examples/openai_sdk.py IMAGE [QUESTION]

OPENAI_BASE_URL names the endpoint (default: http://127.0.0.1:8000/v1), OPENAI_API_KEY its key where it wants one.
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

if len(sys.argv) < 2:
    sys.exit(f"usage: {sys.argv[0]} IMAGE [QUESTION]")
path = Path(sys.argv[1])
question = sys.argv[2] if len(sys.argv) > 2 else "What is in the picture?"

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
mime = mimetypes.guess_type(path)[0] or "image/png"
url = f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"
messages = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}],
    }
]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0)
print("whole:   ", answer.choices[0].message.content)

print("streamed: ", end="")
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, temperature=0, stream=True):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
