"""A large file to S3 in parts, so that an upload that broke off goes on where it was.

Invariants
- The object appears with all its bytes, or not at all: S3's own promise for the last request.
- What broke off stays on the server, and the next upload to the same key takes it up if a part of it is ours by its MD5; such
  parts are not sent again, all others are.
- An unfinished upload has the metadata that it was begun with, and S3 tells nobody which. One that was taken up is therefore
  looked at when it is complete: if it was begun for another file of the same beginning, the file is uploaded anew. In between
  the object carries that file's checksum; who reads by the checksum that `put_file` returns never takes it for true.
- Another file's upload to the same key is aborted once it is STALE_S old: before that, somebody may be at it. Those of keys
  that nobody writes again are the server's to remove (MinIO does after a day; AWS S3: a lifecycle rule).
- A server that does not let us look for unfinished uploads gets a new one: going on is a saving, no promise.
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
from minio.error import S3Error

PART = 8 << 20  # a smaller one is refused by S3 (5 MiB), a larger one costs more to send again
MOST = 10_000  # parts that S3 allows
WORKERS = 3
STALE_S = 24 * 3600.0

log = structlog.get_logger()


def upload(client: Minio, bucket: str, key: str, file: IO[bytes], size: int, headers: dict[str, str]) -> None:
    """`headers` of the object, its metadata too; `size` of at least one byte. Raises what the client raises, and OSError for
    a file that is shorter than `size` by now; may be repeated then, and does not begin anew."""
    if (found := _unfinished(client, bucket, key, file, size)) is not None:
        try:
            _finish(client, bucket, key, file, size, *found)
            if _carries(client, bucket, key, headers):
                return
        except S3Error as error:
            if error.code != "NoSuchUpload":  # somebody with the same file has just completed it, or it was aborted
                raise
    upload_id = client._create_multipart_upload(bucket, key, {**headers})
    _finish(client, bucket, key, file, size, upload_id, {})


def part_length(size: int) -> int:
    """The same for the same file in every attempt. At most MOST parts whatever the size."""
    return max(PART, -(-size // MOST))


def _read(file: IO[bytes], size: int, number: int) -> bytes:
    """Raises OSError where the file is shorter."""
    length = part_length(size)
    data = os.pread(file.fileno(), length, (number - 1) * length)
    if len(data) != min(length, size - (number - 1) * length):
        raise OSError(f"{file.name}: it became shorter while it was uploaded")
    return data


def _finish(
    client: Minio, bucket: str, key: str, file: IO[bytes], size: int, upload_id: str, there: dict[int, str]
) -> None:
    def send(number: int) -> Part:
        data = _read(file, size, number)
        if number in there and there[number] == _md5(data):
            return Part(number, there[number])
        return Part(number, client._upload_part(bucket, key, data, None, upload_id, number))

    count = -(-size // part_length(size))
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="upload") as pool:
        parts = list(pool.map(send, range(1, count + 1)))  # the first failure cancels what has not begun
    client._complete_multipart_upload(bucket, key, upload_id, parts)


def stored(client: Minio, bucket: str, key: str) -> dict[str, str]:
    """The headers of an object, names in lower case."""
    found = client.stat_object(bucket, key).metadata or {}
    return {name.lower(): str(value) for name, value in found.items()}


def _carries(client: Minio, bucket: str, key: str, headers: dict[str, str]) -> bool:
    found = stored(client, bucket, key)
    return all(
        found.get(name.lower()) == value for name, value in headers.items() if name.lower().startswith("x-amz-meta-")
    )


def _unfinished(client: Minio, bucket: str, key: str, file: IO[bytes], size: int) -> tuple[str, dict[int, str]] | None:
    """An unfinished upload that has a part of ours, and the MD5 of the parts it has."""
    try:
        uploads = client._list_multipart_uploads(bucket, prefix=key).uploads
        found = None
        for one in uploads:
            if one.object_name != key or one.upload_id is None:
                continue
            there = _parts(client, bucket, key, one.upload_id)
            if found is None and any(
                _is_ours(file, size, number, md5) for number, md5 in sorted(there.items())[:WORKERS]
            ):
                found = one.upload_id, there
                log.info("upload_taken_up", key=key, parts=len(there))
            elif one.initiated_time is not None and one.initiated_time.timestamp() < time.time() - STALE_S:
                client._abort_multipart_upload(bucket, key, one.upload_id)
        return found
    except S3Error as error:
        log.info("unfinished_uploads_unknown", key=key, error=str(error.code))
        return None


def _is_ours(file: IO[bytes], size: int, number: int, md5: str) -> bool:
    return number * part_length(size) < size + part_length(size) and _md5(_read(file, size, number)) == md5


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
