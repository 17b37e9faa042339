"""`etude data …`: make token files of a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from shared.options import finite

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make token files of a corpus.", pretty_exceptions_enable=False
)


@app.callback()
def group() -> None:
    """One command for now; still `etude data tokenize`."""


@app.command()
def tokenize(
    source: Annotated[Path, typer.Argument(metavar="DIR|JSONL", help="A folder of text files, or a JSONL file.")],
    tokenizer: Annotated[Path, typer.Option(help="The checkpoint whose tokenizer encodes the text.")],
    out: Annotated[Path, typer.Option(help="Where the token files go: a new or an empty folder.")],
    suffix: Annotated[
        list[str] | None,
        typer.Option(help="Take files of this suffix, e.g. .py. Repeatable; left out: all text files."),
    ] = None,
    text_field: Annotated[
        str, typer.Option("--field", help="Of a JSONL line: the field that holds the text.")
    ] = "text",
    held_out: Annotated[
        Path | None, typer.Option(help="Where held-out documents go: a new or an empty folder. Left out: none are.")
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of the documents that is held out.", min=0.0001, max=0.9, callback=finite)
    ] = 0.02,
    seed: Annotated[int, typer.Option(help="Which documents are held out.", min=0, max=2**63 - 1)] = 1,
    begin: Annotated[str, typer.Option(help="A control token before every document; left out: none.")] = "",
    end: Annotated[str, typer.Option(help="The control token behind every document; left out: the tokenizer's.")] = "",
) -> None:
    """Write a corpus as token ids that `etude train cpt`, `extend` and `mtp` map into memory.

    Of a folder, every UTF-8 text file of at most 1 MB is a document, but for hidden folders, links and files that were there
    before, byte for byte. Text never becomes a control token.

    Example: etude data tokenize src --tokenizer .cache/smollm --suffix .py --out tokens --held-out tokens-held-out

    Exit code 2: the corpus or the tokenizer cannot be used. Nothing is written then.
    """
    from services.trainer.phases.corpus import BadCorpus, Seen, documents, encoded, is_held_out, marks_of
    from services.trainer.phases.shards import BadShards, Manifest, checksum, write
    from shared.output import NotWritable, require_folder
    from shared.renderers.vocabulary import BadTokenizer, Vocabulary
    from shared.scratch import scratch

    def part(room: Path, held: bool, seen: Seen) -> Manifest:
        def taken() -> Iterator[tuple[np.ndarray, int]]:
            for name, text in documents(source, suffix or (), text_field, seen):
                if held_out is None or is_held_out(name, share, seed) == held:
                    yield encoded(text, vocabulary, marks), len(text.encode())

        try:
            return write(
                room,
                taken(),
                tokenizer=digest,
                vocab_size=vocabulary.size,
                begin=marks.begin_text,
                end=marks.end_text,
            )
        except BadShards as error:
            which = f", of which {share:g} are held out (--share)" if held_out else ""
            raise BadShards(f"{source}{which}: {error}") from None

    try:
        for option, folder in (("--out", out), ("--held-out", held_out)):
            if folder is not None:
                require_folder(folder, option)
                if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                    raise BadCorpus(f"{option}: found something in {folder}; allowed: a new or an empty folder")
        vocabulary = Vocabulary.load(tokenizer)
        digest = checksum(tokenizer / "tokenizer.json")
        marks = marks_of(tokenizer, vocabulary, begin, end)
        with ExitStack() as rooms:
            made = []
            for folder, held in ((out, False), (held_out, True)):
                if folder is not None:
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    room, seen = rooms.enter_context(scratch(folder.parent, f".{folder.name}.")), Seen()
                    made.append((folder, room, part(room, held, seen)))
            for folder, room, _ in made:
                room.chmod(0o755)
                if folder.is_dir():
                    folder.rmdir()
                room.rename(folder)
        for folder, _, found in made:
            sizes = f"{found.documents:,} documents, {found.tokens:,} tokens, {found.text_bytes:,} bytes of text"
            typer.echo(f"{folder}: {sizes}")
        for reason, count in sorted(seen.passed_over.items()):
            typer.echo(f"passed over, {reason}: {count:,}")
    except (BadCorpus, BadShards, BadTokenizer, NotWritable) as error:
        typer.echo(f"data: {error}", err=True)
        raise typer.Exit(2) from None
