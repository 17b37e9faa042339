"""Objects in MinIO or any S3.

The checksum (xxh3-128) travels as user metadata, so that `head` needs no download; a get re-computes it. A put is
atomic by S3's own promise. `put_if_absent` is a PUT with `If-None-Match: *` (MinIO, AWS S3 and others since 2024).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash
from minio import Minio
from minio.error import S3Error

from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, keys
from shared.objects.directory import CHUNK

CHECKSUM = "x-amz-meta-xxh3-128"
_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
_MISSING = ("NoSuchKey", "NoSuchObject")


class S3Objects:
    def __init__(self, client: Minio, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    @classmethod
    def from_url(cls, url: str) -> S3Objects:
        """`s3://BUCKET@HOST:PORT[?secure=1]`. Makes the bucket if it is not there."""
        match = re.fullmatch(r"s3://(?P<bucket>[a-z0-9.-]{3,63})@(?P<host>[^/?@]+)/?(\?secure=(?P<secure>[01]))?", url)
        if not match:
            raise ValueError(f"objects: found {url!r}; allowed: s3://BUCKET@HOST:PORT, s3://BUCKET@HOST:PORT?secure=1")
        access, secret = os.environ.get("ETUDE_S3_ACCESS_KEY"), os.environ.get("ETUDE_S3_SECRET_KEY")
        if not access or not secret:
            raise ValueError("objects: s3:// needs credentials: set ETUDE_S3_ACCESS_KEY and ETUDE_S3_SECRET_KEY")
        client = Minio(match["host"], access_key=access, secret_key=secret, secure=match["secure"] == "1")
        bucket = match["bucket"]
        if not client.bucket_exists(bucket):
            with contextlib.suppress(S3Error):  # another service was faster
                client.make_bucket(bucket)
        return cls(client, bucket)

    def put(self, key: str, data: bytes) -> Ref:
        checksum = xxhash.xxh3_128_hexdigest(data)
        self._client.put_object(
            self._bucket, keys.check(key), io.BytesIO(data), len(data), metadata={"xxh3-128": checksum}
        )
        return Ref(key=key, size=len(data), checksum=checksum)

    def put_file(self, key: str, path: Path) -> Ref:
        hasher, size = xxhash.xxh3_128(), 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                hasher.update(chunk)
                size += len(chunk)
            file.seek(0)
            self._client.put_object(
                self._bucket, keys.check(key), file, size, metadata={"xxh3-128": hasher.hexdigest()}
            )
        return Ref(key=key, size=size, checksum=hasher.hexdigest())

    def put_if_absent(self, key: str, data: bytes) -> Ref | None:
        checksum = xxhash.xxh3_128_hexdigest(data)
        # The client's public put_object takes no conditional headers; this is the request that it would make.
        headers: dict[str, str | list[str] | tuple[str]]
        headers = {"If-None-Match": "*", CHECKSUM: checksum, "Content-Type": "application/octet-stream"}
        try:
            self._client._put_object(self._bucket, keys.check(key), data, headers)
        except S3Error as error:
            if error.code in _TAKEN:
                return None
            raise
        return Ref(key=key, size=len(data), checksum=checksum)

    def get(self, ref: Ref) -> bytes:
        return b"".join(self._chunks(ref))

    def get_file(self, ref: Ref, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with temporary.open("xb") as sink:
                for chunk in self._chunks(ref):
                    sink.write(chunk)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def head(self, key: str) -> Ref:
        try:
            found = self._client.stat_object(self._bucket, keys.check(key))
        except S3Error as error:
            if error.code in _MISSING:
                raise ObjectMissing(key) from None
            raise
        checksum = (found.metadata or {}).get(CHECKSUM, "")
        return Ref(key=key, size=found.size or 0, checksum=checksum)

    def list(self, prefix: str) -> Iterator[str]:
        for found in self._client.list_objects(self._bucket, prefix=prefix, recursive=True):
            if found.object_name:
                yield found.object_name

    def delete(self, key: str) -> None:
        self._client.remove_object(self._bucket, keys.check(key))

    def _chunks(self, ref: Ref) -> Iterator[bytes]:
        """The object's bytes; ends with ObjectDamaged unless they are those that `ref` names."""
        try:
            response = self._client.get_object(self._bucket, keys.check(ref.key))
        except S3Error as error:
            if error.code in _MISSING:
                raise ObjectMissing(ref.key) from None
            raise
        hasher, size = xxhash.xxh3_128(), 0
        try:
            for chunk in response.stream(CHUNK):
                hasher.update(chunk)
                size += len(chunk)
                yield chunk
        finally:
            response.close()
            response.release_conn()
        if (size, hasher.hexdigest()) != (ref.size, ref.checksum):
            raise ObjectDamaged(
                f"{ref.key}: {size} bytes of checksum {hasher.hexdigest()}, expected {ref.size} of {ref.checksum}"
            )
