"""Objects in MinIO or any S3.

Invariants
- A put is atomic by S3's own promise. The checksum (xxh3-128) travels as user metadata, so that `head` needs no download;
  a get re-computes it.
- `put_if_absent` is a PUT with `If-None-Match: *` (MinIO, AWS S3 and others since 2024). A request whose answer was lost
  is sent again and then refused by its own first try: the object carries who wrote it, so that we know our own.
- A store that ignores that header is refused: each process sends its first such PUT twice, and the second must fail. (Under
  the same key, because most services may write no others.)
- A large file goes in parts: a few of them lie in memory, never the whole. An upload that broke off goes on where it was
  when it is asked for again (`multipart`).
- A server that is away, hangs or refuses is ObjectsUnavailable after a bounded time.
- A put that is denied is tried again a few times: MinIO denies one whose folder a delete removes at that moment.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import certifi
import urllib3
import xxhash
from minio import Minio
from minio.error import MinioException, S3Error
from urllib3.exceptions import HTTPError

from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, ObjectsUnavailable, keys, multipart
from shared.objects.directory import CHUNK
from shared.settings import masked

PREFIX = "x-amz-meta-"
CONTENT_TYPE = "application/octet-stream"
CHECKSUM, WRITER = "xxh3-128", "writer"
# A stopped server accepts no connection, a hanging one sends nothing: callers retry, so a request may fail soon. A part
# of a large file takes a while on a slow network.
CONNECT_S, READ_S = 3.0, 20.0
TRIES = urllib3.Retry(total=2, read=1, backoff_factor=0.2, status_forcelist=[500, 502, 503, 504])
logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it tells every retry; what comes of them, we do
CONNECTIONS = 32  # kept per process; more threads than that wait for nobody, they open one of their own
DENIED_WAITS_S = (0.05, 0.2, 0.5)  # before each further try of a put that was denied
_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
_MISSING = ("NoSuchKey", "NoSuchObject")
_ADVICE = {
    "InvalidAccessKeyId": "the server does not know ETUDE_S3_ACCESS_KEY; set the one it was given",
    "SignatureDoesNotMatch": "ETUDE_S3_SECRET_KEY does not fit ETUDE_S3_ACCESS_KEY; set both",
    "AccessDenied": "this access key may not do that; give it a policy to read, write, list and delete in the bucket",
    "NoSuchBucket": "the bucket is gone; make it again, or name another one in ETUDE_OBJECTS",
    "XMinioStorageFull": "its disk is full; free some space",
    "NotImplemented": "it does not know this request; a PUT with If-None-Match must be one that it does",
    "RequestTimeTooSkewed": "its clock and ours differ too much; set them",
}


class S3Objects:
    def __init__(self, client: Minio, bucket: str, where: str, forget: Callable[[], None] = lambda: None) -> None:
        """`where`: the server, for people. `forget`: closes the connections that the client keeps."""
        self._client = client
        self._forget = forget
        self._bucket = bucket
        self._where = where
        self._keeps_conditions = False  # it has refused a conditional put, as it should

    @classmethod
    def from_url(cls, url: str) -> S3Objects:
        """`s3://BUCKET@HOST:PORT[?secure=1]`. Makes the bucket if it is not there. Raises ValueError, ObjectsUnavailable."""
        match = re.fullmatch(r"s3://(?P<bucket>[a-z0-9.-]{3,63})@(?P<host>[^/?@]+)/?(\?secure=(?P<secure>[01]))?", url)
        if not match:
            raise ValueError(
                f"objects: found {masked(url)!r}; allowed: s3://BUCKET@HOST:PORT, s3://BUCKET@HOST:PORT?secure=1"
            )
        access, secret = os.environ.get("ETUDE_S3_ACCESS_KEY"), os.environ.get("ETUDE_S3_SECRET_KEY")
        if not access or not secret:
            raise ValueError("objects: s3:// needs credentials: set ETUDE_S3_ACCESS_KEY and ETUDE_S3_SECRET_KEY")
        http = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_S, read=READ_S),
            retries=TRIES,
            maxsize=CONNECTIONS,
            cert_reqs="CERT_REQUIRED",
            ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
        )
        secure = match["secure"] == "1"
        client = Minio(match["host"], access_key=access, secret_key=secret, secure=secure, http_client=http)
        objects = cls(client, match["bucket"], url, http.clear)
        with objects._answers():
            if not client.bucket_exists(match["bucket"]):
                with contextlib.suppress(
                    S3Error
                ):  # another service was faster, or its first use will say what is wrong
                    client.make_bucket(match["bucket"])
        return objects

    def put(self, key: str, data: bytes) -> Ref:
        checksum = xxhash.xxh3_128_hexdigest(data)
        with self._answers(keys.check(key)):
            _again_if_denied(
                lambda: self._client.put_object(
                    self._bucket, key, io.BytesIO(data), len(data), metadata={CHECKSUM: checksum}
                )
            )
        return Ref(key=key, size=len(data), checksum=checksum)

    def put_file(self, key: str, path: Path) -> Ref:
        keys.check(key)
        hasher, size = xxhash.xxh3_128(), 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                hasher.update(chunk)
                size += len(chunk)
            checksum = hasher.hexdigest()

            def upload() -> None:
                file.seek(0)
                if size > multipart.PART:
                    headers = {"Content-Type": CONTENT_TYPE, PREFIX + CHECKSUM: checksum}
                    multipart.upload(self._client, self._bucket, key, file, size, headers)
                else:
                    self._client.put_object(self._bucket, key, file, size, metadata={CHECKSUM: checksum})

            with self._answers(key):
                _again_if_denied(upload)
        return Ref(key=key, size=size, checksum=checksum)

    def put_if_absent(self, key: str, data: bytes) -> Ref | None:
        keys.check(key)
        checksum = xxhash.xxh3_128_hexdigest(data)
        with self._answers(key):
            won = self._put_new(key, data, checksum)
            if won and not self._keeps_conditions:
                self._require_conditions(key, data, checksum)
        self._keeps_conditions |= not won
        return Ref(key=key, size=len(data), checksum=checksum) if won else None

    def _put_new(self, key: str, data: bytes, checksum: str) -> bool:
        """Put the object unless there is one. Return whether we did."""
        writer = uuid.uuid4().hex
        headers: dict[str, str | list[str] | tuple[str]] = {
            "If-None-Match": "*",
            "Content-Type": CONTENT_TYPE,
            PREFIX + CHECKSUM: checksum,
            PREFIX + WRITER: writer,
        }
        try:
            # The client's public put_object takes no conditional headers; this is the request that it would make.
            _again_if_denied(lambda: self._client._put_object(self._bucket, key, data, headers))
        except S3Error as error:
            if error.code not in _TAKEN:
                raise
            return self._metadata(key).get(PREFIX + WRITER) == writer
        return True

    def _require_conditions(self, key: str, data: bytes, checksum: str) -> None:
        """Put what was just put once more: the store must refuse it. Without an answer the next put asks again."""
        try:
            if not self._put_new(key, data, checksum):
                self._keeps_conditions = True
                return
        except (HTTPError, MinioException):
            return
        raise ObjectsUnavailable(
            f"objects (ETUDE_OBJECTS): {self._where} ignores If-None-Match: it took two objects under one key, each as the first, "
            "so that two trainers could hold one run. Use a store with conditional writes (MinIO, AWS S3), or a newer release "
            "of this one, without a gateway that takes the header out"
        )

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
        keys.check(key)
        with self._answers(key):
            metadata = self._metadata(key)
        return Ref(key=key, size=int(metadata["content-length"]), checksum=metadata.get(PREFIX + CHECKSUM, ""))

    def list(self, prefix: str) -> Iterator[str]:
        return (key for key, _ in self.sizes(prefix))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._answers():
            for found in self._client.list_objects(self._bucket, prefix=prefix, recursive=True):
                if found.object_name:
                    yield found.object_name, found.size or 0

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error."""
        with self._answers(keys.check(key)):
            self._client.remove_object(self._bucket, key)

    def _metadata(self, key: str) -> dict[str, str]:
        return multipart.stored(self._client, self._bucket, key)

    def _chunks(self, ref: Ref) -> Iterator[bytes]:
        """The object's bytes; ends with ObjectDamaged unless they are those that `ref` names."""
        keys.check(ref.key)
        hasher, size = xxhash.xxh3_128(), 0
        with self._answers(ref.key):
            response = self._client.get_object(self._bucket, ref.key)
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

    @contextlib.contextmanager
    def _answers(self, key: str = "") -> Iterator[None]:
        """What the server, or its silence, means to callers.

        After a fail-over behind its address, kept connections lead to the old server for good. So a failure closes them, and the
        next request makes a new one.
        """
        try:
            yield
        except (HTTPError, MinioException) as error:
            refused = self._meaning(error, key)
            if isinstance(refused, ObjectsUnavailable):
                self._forget()
            raise refused from None

    def _meaning(self, error: HTTPError | MinioException, key: str) -> ObjectMissing | ObjectsUnavailable:
        if isinstance(error, S3Error):
            if error.code in _MISSING:
                return ObjectMissing(key)
            advice = _ADVICE.get(error.code or "", error.message or "no reason given")
            return ObjectsUnavailable(f"objects (ETUDE_OBJECTS): {self._where} says {error.code}: {advice}")
        reason = getattr(error, "reason", None) or error
        return ObjectsUnavailable(
            f"objects (ETUDE_OBJECTS): no answer from {self._where} ({reason}); is the address right, does it run?"
        )


def _again_if_denied(put: Callable[[], object]) -> None:
    """Run the put, and again where the store denies it. Raises what the last try raised."""
    for wait_s in DENIED_WAITS_S:
        try:
            put()
        except S3Error as error:
            if error.code != "AccessDenied":
                raise
            time.sleep(wait_s)
        else:
            return
    put()
