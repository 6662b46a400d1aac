"""The same question by LangChain: `ChatOpenAI` speaks to any OpenAI endpoint.

    pip install langchain-openai
    python docs/examples/langchain_chat.py IMAGE [QUESTION]

OPENAI_BASE_URL names the endpoint (default: http://127.0.0.1:8000/v1), MODEL the served model (default: epd-demo),
OPENAI_API_KEY the key where one is wanted.
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path

try:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
except ImportError:
    sys.exit("LangChain is not installed: pip install langchain-openai")

if len(sys.argv) < 2:
    sys.exit(f"usage: {sys.argv[0]} IMAGE [QUESTION]")
path = Path(sys.argv[1])
question = sys.argv[2] if len(sys.argv) > 2 else "What is in the picture?"

model = ChatOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    model=os.environ.get("MODEL", "epd-demo"),
    max_tokens=64,
    temperature=0,
)
mime = mimetypes.guess_type(path)[0] or "image/png"
url = f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"
content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
print(model.invoke([HumanMessage(content=content)]).content)
