"""A large file to S3 in parts, so that an upload that broke off goes on where it was.

Invariants
- The object appears with all its bytes and its metadata, or not at all: S3's own promise for the last request.
- What broke off stays on the server, and the next upload of the same bytes to the same key takes it up. That they are the
  same, the upload says itself: part MARK carries the whole file's checksum, and is no part of the object. (What metadata an
  unfinished upload has, S3 tells nobody.) Of the other parts each one whose MD5 is that of ours is not sent again.
- Another file's upload to the same key is aborted once it is STALE_S old: before that, somebody may be at it. Those of keys
  that nobody writes again are the server's to remove (MinIO does after a day; AWS S3: a lifecycle rule).
- No more than WORKERS parts lie in memory.
"""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import structlog
from minio import Minio
from minio.datatypes import Part

PART = 8 << 20  # a smaller one is refused by S3 (5 MiB), a larger one costs more to send again
MARK = 10_000  # the last number that S3 allows
WORKERS = 3
STALE_S = 24 * 3600.0

log = structlog.get_logger()


def upload(
    client: Minio, bucket: str, key: str, file: IO[bytes], size: int, checksum: str, headers: dict[str, str]
) -> None:
    """`headers` of the object; `size` of at least one byte. Raises what the client raises, and OSError for a file that is
    shorter than `size` by now; may be repeated then, and does not begin anew."""
    length = part_length(size)
    count = -(-size // length)
    upload_id, there = _taken_up(client, bucket, key, checksum) or _begun(client, bucket, key, checksum, headers)

    def send(number: int) -> Part:
        data = os.pread(file.fileno(), length, (number - 1) * length)
        if len(data) != min(length, size - (number - 1) * length):
            raise OSError(f"{file.name}: it became shorter while it was uploaded to {key}")
        if number in there and there[number] == _md5(data):
            return Part(number, there[number])
        return Part(number, client._upload_part(bucket, key, data, None, upload_id, number))

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="upload") as pool:
        parts = list(pool.map(send, range(1, count + 1)))  # the first failure cancels what has not begun
    client._complete_multipart_upload(bucket, key, upload_id, parts)


def part_length(size: int) -> int:
    """The same for the same file in every attempt. Below MARK parts whatever the size."""
    return max(PART, -(-size // (MARK - 1)))


def _begun(client: Minio, bucket: str, key: str, checksum: str, headers: dict[str, str]) -> tuple[str, dict[int, str]]:
    upload_id = client._create_multipart_upload(bucket, key, {**headers})
    client._upload_part(bucket, key, checksum.encode(), None, upload_id, MARK)
    return upload_id, {}


def _taken_up(client: Minio, bucket: str, key: str, checksum: str) -> tuple[str, dict[int, str]] | None:
    """An unfinished upload of the same bytes, and the MD5 of the parts it has."""
    found = None
    for one in client._list_multipart_uploads(bucket, prefix=key).uploads:
        if one.object_name != key or one.upload_id is None:
            continue
        there = _parts(client, bucket, key, one.upload_id)
        if found is None and there.get(MARK) == _md5(checksum.encode()):
            found = one.upload_id, there
            log.info("upload_taken_up", key=key, parts=len(there) - 1)
        elif one.initiated_time is not None and one.initiated_time.timestamp() < time.time() - STALE_S:
            client._abort_multipart_upload(bucket, key, one.upload_id)
    return found


def _parts(client: Minio, bucket: str, key: str, upload_id: str) -> dict[int, str]:
    parts: dict[int, str] = {}
    marker: str | None = None
    while True:
        page = client._list_parts(bucket, key, upload_id, part_number_marker=marker)
        parts.update((part.part_number, part.etag) for part in page.parts)
        marker = page.next_part_number_marker
        if not page.is_truncated or not marker:
            return parts


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
