"""What the loopback Hub holds: repositories by git's own hashes, large files by sha256, buckets by Xet hashes, faults,
and a log."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LARGE = (".safetensors", ".bin", ".pt", ".gguf", ".parquet", ".arrow", ".npz", ".onnx", ".model")
LARGE_BYTES = 10 * 2**20
ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE).encode()


def git_object(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


@dataclass(frozen=True)
class Blob:
    """A file of a commit: its own content, or the pointer to a large one."""

    content: bytes
    sha256: str | None = None  # of the large file that the content points to
    size: int = 0

    @property
    def oid(self) -> str:
        return git_object("blob", self.content)

    @staticmethod
    def pointer(sha256: str, size: int) -> Blob:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return Blob(text.encode(), sha256, size)


def tree_oids(files: Mapping[str, Blob]) -> dict[str, str]:
    """Every folder's git hash by its path; the root's is under the empty one."""
    entries: dict[str, dict[bytes, bytes]] = {"": {}}
    for path, blob in files.items():
        parent, _, name = path.rpartition("/")
        while parent not in entries:
            entries[parent] = {}
            parent = parent.rpartition("/")[0]
        entries[path.rpartition("/")[0]][name.encode()] = b"100644 " + name.encode() + b"\0" + bytes.fromhex(blob.oid)
    found: dict[str, str] = {}
    for folder in sorted(entries, key=lambda path: (-path.count("/") - bool(path), path)):
        # git sorts a folder as though its name ended in a slash
        found[folder] = git_object("tree", b"".join(entry for _, entry in sorted(entries[folder].items())))
        if folder:
            parent, _, name = folder.rpartition("/")
            entry = b"40000 " + name.encode() + b"\0" + bytes.fromhex(found[folder])
            entries[parent][name.encode() + b"/"] = entry
    return found


@dataclass(frozen=True)
class Commit:
    files: Mapping[str, Blob]
    title: str
    description: str
    parent: str | None
    number: int  # of the repository's commits: time of a test is no time

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(1_700_000_000 + self.number))

    @property
    def oid(self) -> str:
        parent = f"parent {self.parent}\n" if self.parent else ""
        who = f"loopback <hub@localhost> {1_700_000_000 + self.number} +0000"
        text = f"tree {tree_oids(self.files)['']}\n{parent}author {who}\ncommitter {who}\n\n{self.title}\n"
        return git_object("commit", (text + self.description).encode())


@dataclass
class Repository:
    kind: str  # model or dataset
    name: str  # owner/name
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": Blob(ATTRIBUTES)}, "initial commit", "")

    def commit(self, branch: str, files: Mapping[str, Blob], title: str, description: str) -> str:
        made = Commit(dict(files), title, description, self.branches.get(branch), len(self.commits))
        self.commits[made.oid] = made
        self.branches[branch] = made.oid
        return made.oid

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a tag, or seven letters of a hash."""
        named = self.branches.get(revision) or self.tags.get(revision)
        close = [oid for oid in self.commits if len(revision) >= 7 and oid.startswith(revision)]
        return named or (close[0] if close else None)

    def files(self, revision: str = "main") -> Mapping[str, Blob]:
        return self.commits[self.resolve(revision) or ""].files

    def history(self, oid: str | None) -> Iterator[tuple[str, Commit]]:
        while oid is not None:
            yield oid, self.commits[oid]
            oid = self.commits[oid].parent


@dataclass
class Bucket:
    """Files that are overwritten in place: no history, no folders of their own, no condition on a write."""

    name: str  # owner/name
    private: bool
    files: dict[str, str] = field(default_factory=dict)  # path -> Xet hash


@dataclass
class Fault:
    """What goes wrong at a call, `times` times after the first `skip`; one of status, cuts and wrong_hash.

    Args:
        call: A call's name, as the log shows it.
        status: Answer so and do nothing.
        message: The Hub's words beside the status.
        code: Its name of the error, which clients go by.
        retry_after: Seconds, in the header of that name.
        cut_request_at: Read so many bytes of the body, do nothing, and drop the connection.
        cut_answer_at: Do it, send so many bytes of the answer's body, and drop the connection.
        wrong_hash: A bit flips on the way: in what arrives at an upload, in what leaves at a download; at `paths` the
            Hub states the hash of other content.
    """

    call: str
    status: int | None = None
    message: str = ""
    code: str = ""
    retry_after: int | None = None
    cut_request_at: int | None = None
    cut_answer_at: int | None = None
    wrong_hash: bool = False
    times: int = 1
    skip: int = 0


@dataclass(frozen=True)
class Request:
    """One line of the log."""

    call: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int  # 0: dropped before an answer


def flip(content: bytes) -> bytes:
    """The content with one bit of its last byte the other way."""
    return content[:-1] + bytes([content[-1] ^ 1]) if content else content


@dataclass(frozen=True)
class XetFile:
    """A file that the client left in a `local://` store."""

    hash: str
    size: int
    sha256: tuple[str, ...]  # in both orders of bytes that clients write; empty: the client left it out


def xet_files(store: Path) -> Iterator[XetFile]:
    """The files of a `local://` store, read from its shards.

    A shard lists, after a header of 48 bytes, one block for each file: hash, flags, number of entries; then entries of
    48 bytes each, as many again with verification (bit 31), and the sha256 (bit 30). An entry is a range of chunks:
    their container's hash, flags, bytes, first and last chunk.
    """
    for shard in sorted(store.rglob("*.mdb")):
        data, at = shard.read_bytes(), 48
        while at + 48 <= len(data) and data[at : at + 32] != b"\xff" * 32:
            file_hash, (flags, entries) = _words(data[at : at + 32]), struct.unpack("<II", data[at + 32 : at + 40])
            starts = [at + 48 * (1 + entry) for entry in range(entries)]
            size = sum(struct.unpack("<I", data[start + 36 : start + 40])[0] for start in starts)
            at += 48 * (1 + entries) + (48 * entries if flags >> 31 & 1 else 0)
            sha256: tuple[str, ...] = ()
            if flags >> 30 & 1:
                sha256 = (_words(data[at : at + 32]), data[at : at + 32].hex())
                at += 48
            yield XetFile(file_hash, size, sha256)


def xet_hash(store: Path, sha256: str) -> str | None:
    """The Xet hash of a file in a `local://` store."""
    return next((file.hash for file in xet_files(store) if sha256 in file.sha256), None)


def _words(content: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", content))
