"""`python -m tests.support.catalogue_table` prints the catalogue as the table of docs/models.md."""

from collections.abc import Iterable

from app.service.catalogue import TABLE_CONTEXT, Entry, File, entries


def table(found: Iterable[Entry]) -> str:
    """The catalogue for docs/models.md, in Markdown, ended by a newline."""
    lines = [
        "| family | target, its file | head | draft models (**suggested**) | memory, GPU: target, "
        "with drafts | memory, processor | licence |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        drafts = ", ".join(
            f"**{draft.name}** {size(draft)}"
            if draft in each.stack
            else f"{draft.name} {size(draft)}"
            for draft in each.drafts
        )
        files = f"`{each.target.source}` {size(each.target)}"
        if each.target.processor:
            other = each.target.processor
            files += f"; on a processor `{other.source.rpartition(':')[2]}` {size(other)}"
        memory = [
            f"{gigabytes(own.alone_need(TABLE_CONTEXT, device).total)}, "
            f"{gigabytes(own.need(TABLE_CONTEXT, device).total)}"
            for device in ("cuda", "cpu")
            for own in (each.on(device),)
        ]
        head = each.head.name if each.head else "none"
        if each.head and each.head.bytes:
            head += f" {gigabytes(each.head.bytes)}"
        lines.append(
            f"| {each.name} ({each.maker}) | {files} | {head} "
            f"| {drafts or f'none: {each.alone}'} | {memory[0]} | {memory[1]} "
            f"| [{each.licence}]({each.licence_address}) |"
        )
    return "\n".join(lines) + "\n"


def size(each: File) -> str:
    return f"{'about ' if each.estimated else ''}{gigabytes(each.bytes)}"


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


if __name__ == "__main__":
    print(table(entries()), end="")
