"""Exports of other programs in the forms they have today, each text of them a word of its own.

`SAMPLES` has one conversation for each program. A word is `kept-…` if it belongs into an import,
`tool-…` if it was meant for a tool or is no part of the conversation, `thought-…` if it is
thinking.
"""

import copy
from typing import Any

CITED = "\ue200cite\ue202turn0search0\ue201"


def node(id: str, parent: str | None, role: str, content: Any, **more: Any) -> dict[str, Any]:
    if isinstance(content, str):
        content = [content]
    if isinstance(content, list):
        content = {"content_type": "text", "parts": content}
    message = {"author": {"role": role, "name": None, "metadata": {}}, "create_time": 1.7e9}
    message |= {"content": content, "recipient": "all", "metadata": {}, "channel": None} | more
    return {"id": id, "parent": parent, "children": [], "message": message}


def chatgpt(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    root = {"id": "root", "parent": None, "children": [], "message": None}
    mapping = {each["id"]: each for each in (root, *nodes)}
    last = nodes[-1]["id"] if nodes else "root"
    return {"title": "title", "mapping": mapping, "current_node": last, **more}


def spoken(text: str, **pointer: Any) -> dict[str, Any]:
    parts = [
        {"content_type": "audio_transcription", "text": text, "direction": "in"},
        {"content_type": "real_time_user_audio_video_asset_pointer", **pointer},
    ]
    return {"content_type": "multimodal_text", "parts": parts}


CHATGPT = chatgpt(
    node("s", "root", "system", "", metadata={"is_visually_hidden_from_conversation": True}),
    node(
        "c",
        "s",
        "user",
        {"content_type": "user_editable_context", "user_profile": "tool-a", "parts": None},
    ),
    node("u", "c", "user", spoken("kept-a")),
    node(
        "t",
        "u",
        "assistant",
        {"content_type": "thoughts", "thoughts": [{"summary": "", "content": "thought-a"}]},
    ),
    node("k", "t", "assistant", {"content_type": "code", "text": "tool-b"}, recipient="python"),
    node("r", "k", "tool", {"content_type": "execution_output", "text": "tool-c"}),
    node("w", "r", "assistant", {"content_type": "reasoning_recap", "content": "tool-d"}),
    node("a", "w", "assistant", f"kept-b {CITED}"),
    node(
        "v",
        "a",
        "user",
        {"content_type": "multimodal_text", "parts": [{"asset_pointer": "x"}, "kept-c"]},
        metadata={"attachments": [{"name": "tool-e"}]},
    ),
    node("d", "v", "assistant", '{"content": "tool-f"}', recipient="canmore.create_textdoc"),
    node("e", "d", "tool", "tool-g"),
    node("o", "v", "assistant", "kept-d"),
    node("z", "e", "assistant", "kept-e"),
)
WEBUI_ITEMS = [
    {
        "id": "1",
        "parentId": None,
        "role": "user",
        "content": "kept-a",
        "files": [{"type": "image"}],
    },
    {
        "id": "2",
        "parentId": "1",
        "role": "assistant",
        "content": '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 '
        "seconds</summary>\n&gt; thought-a\n</details>\n"
        '<details type="tool_calls" done="true" name="x" arguments="{&quot;tool-a&quot;}">\n'
        "<summary>Tool Executed</summary>\n```json\ntool-b\n```\n</details>\nkept-b",
    },
    {
        "id": "3",
        "parentId": "2",
        "role": "user",
        "content": "kept-c",
        "files": [
            {"type": "file", "name": "n", "file": {"data": {"content": "kept-d"}}},
            {"type": "collection", "name": "tool-c"},
        ],
    },
    {
        "id": "4",
        "parentId": "3",
        "role": "assistant",
        "content": "",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought-b"}]},
            {"type": "function_call", "name": "x", "arguments": "tool-d"},
            {"type": "function_call_output", "output": [{"type": "input_text", "text": "tool-e"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "kept-e"}]},
        ],
        "sources": [{"source": {"name": "tool-f"}}],
    },
    {
        "id": "5",
        "parentId": "3",
        "role": "assistant",
        "content": "",
        "error": {"content": "tool-g"},
    },
]
WEBUI = {
    "title": "title",
    "chat": {
        "history": {"messages": {item["id"]: item for item in WEBUI_ITEMS}, "currentId": "4"},
        "messages": WEBUI_ITEMS,
    },
}
LLAMA_ITEMS: list[dict[str, Any]] = [
    {"id": "r", "parent": None, "type": "root", "role": "system", "content": ""},
    {"id": "s", "parent": "r", "role": "system", "content": "kept-a"},
    {
        "id": "u",
        "parent": "s",
        "role": "user",
        "content": "kept-b",
        "extra": [
            {"type": "TEXT", "name": "n", "content": "kept-c"},
            {"type": "IMAGE", "name": "tool-a", "base64Url": "x"},
        ],
    },
    {
        "id": "a",
        "parent": "u",
        "role": "assistant",
        "content": "",
        "reasoningContent": "thought-a",
        "toolCalls": '[{"function": {"name": "tool-b"}}]',
    },
    {"id": "t", "parent": "a", "role": "tool", "content": "tool-c", "toolCallId": "1"},
    {
        "id": "b",
        "parent": "t",
        "role": "assistant",
        "content": "kept-d\n\n<<<AGENTIC_TOOL_CALL_START>>>\n<<<TOOL_NAME:tool-d>>>\n"
        "<<<TOOL_ARGS_START>>>{}<<<TOOL_ARGS_END>>>x<<<AGENTIC_TOOL_CALL_END>>>\nkept-e",
    },
]
LLAMA = {"conv": {"id": "c", "name": "title", "currNode": "b"}, "messages": LLAMA_ITEMS}
SHAREGPT = {
    "id": "x",
    "conversations": [
        {"from": "system", "value": "kept-a"},
        {"from": "human", "value": "kept-b"},
        {"from": "function_call", "value": "tool-a"},
        {"from": "observation", "value": "tool-b"},
        {"from": "gpt", "value": "<tool_call>\n{tool-c}\n</tool_call>"},
        {"from": "tool", "value": "tool-d"},
        {"from": "gpt", "value": "kept-c"},
    ],
}
PLAIN = {
    "title": "title",
    "messages": [
        {"role": "developer", "content": "kept-a"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "kept-b"}, {"type": "image_url", "image_url": 1}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "thought-a",
            "tool_calls": [{"function": {"name": "tool-a"}}],
        },
        {"role": "tool", "content": "tool-b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "thought-b"},
                {"type": "text", "text": "kept-c"},
                {"type": "tool_use", "name": "tool-c", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": "tool-d"}]},
        {"role": "assistant", "content": "kept-d", "annotations": [{"url": "tool-e"}]},
    ],
}
SAMPLES: dict[str, Any] = {
    "ChatGPT": CHATGPT,
    "Open WebUI": WEBUI,
    "llama.cpp": LLAMA,
    "ShareGPT": SHAREGPT,
    "messages": PLAIN,
}


def messages_of(name: str, value: Any) -> list[Any]:
    """The messages in an export of that program, which may be damaged."""
    if name == "ChatGPT":
        return [each["message"] for each in value["mapping"].values() if each.get("message")]
    if name == "Open WebUI":
        return [*value["chat"]["history"]["messages"].values()]
    return value["conversations" if name == "ShareGPT" else "messages"]


def alone(name: str, message: Any) -> Any:
    """An export with that message after a sound one, and nothing else."""
    value: Any = copy.deepcopy(SAMPLES[name])
    if name == "ChatGPT":
        first = node("u", "root", "user", "sound")
        return chatgpt(first, {"id": "a", "parent": "u", "message": message})
    if name == "Open WebUI":
        first = {"parentId": None, "role": "user", "content": "sound"}
        second = {**message, "parentId": "1"} if isinstance(message, dict) else message
        value["chat"]["history"] = {"messages": {"1": first, "2": second}, "currentId": "1"}
    elif name == "llama.cpp":
        first = {"id": "1", "parent": None, "role": "user", "content": "sound"}
        second = {**message, "id": "2", "parent": "1"} if isinstance(message, dict) else message
        value = {"conv": {"currNode": "1"}, "messages": [first, second]}
    else:
        rows = [{"role": "user", "content": "sound"}, message]
        value = {"conversations" if name == "ShareGPT" else "messages": rows}
    return value
