"""The loopback Hub's wire: one handler, a table of routes, two origins (the Hub and where large files lie)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from tests.support.hub.card_rules import card_mistakes, card_values
from tests.support.hub.state import (
    LARGE,
    LARGE_BYTES,
    Blob,
    Bucket,
    Fault,
    Repository,
    Request,
    flip,
    git_object,
    tree_oids,
    xet_files,
    xet_hash,
)


@dataclass
class Hub:
    """The state that a test sets up and looks at.

    Args:
        users: token -> what whoami answers beside type and fullname; `name` is needed.
        store: Folder of the Xet store; with None the client must run with HF_HUB_DISABLE_XET=1.
    """

    users: dict[str, dict[str, Any]]
    store: Path | None = None
    url: str = ""
    files_url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # by sha256
    faults: list[Fault] = field(default_factory=list)
    log: list[Request] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def repository(self, name: str, kind: str = "model") -> Repository:
        return self.repositories[kind, name]

    def add(self, name: str, *, private: bool, kind: str = "model") -> Repository:
        """A repository that was there before."""
        return self.repositories.setdefault((kind, name), Repository(kind, name, private))

    def add_bucket(self, name: str, *, private: bool = True) -> Bucket:
        """A bucket that was there before."""
        return self.buckets.setdefault(name, Bucket(name, private))

    def fail(self, call: str, **fault: Any) -> None:
        self.faults.append(Fault(call, **fault))

    def calls(self) -> list[str]:
        return [request.call for request in self.log]

    def content(self, name: str, path: str, revision: str = "main") -> bytes:
        """A file as a reader gets it."""
        blob = self.repository(name).files(revision)[path]
        return blob.content if blob.sha256 is None else self.large[blob.sha256]

    def take_fault(self, call: str) -> Fault | None:
        for fault in self.faults:
            if fault.call == call and fault.skip > 0:
                fault.skip -= 1
            elif fault.call == call and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def knows_large(self, sha256: str) -> bool:
        return sha256 in self.large or (self.store is not None and xet_hash(self.store, sha256) is not None)


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """An answer that is no success, with the Hub's two error headers."""

    def __init__(self, status: int, message: str, code: str = "", **more: Any) -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = as_json({"error": message, **more}, status, headers)


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    plain = {"Content-Type": "application/json; charset=utf-8"}
    return Answer(status, json.dumps(value).encode(), plain | dict(headers or {}))


@dataclass(frozen=True)
class Call:
    """One request, taken apart."""

    hub: Hub
    method: str
    parts: Mapping[str, str]  # the route's named groups, unquoted
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    spoilt: bool  # the hash is to be wrong

    @property
    def data(self) -> Any:
        return json.loads(self.body or b"{}")

    @property
    def user(self) -> dict[str, Any] | None:
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return self.hub.users.get(token) if kind == "Bearer" else None

    @property
    def kind(self) -> str:
        return (self.parts.get("kind") or "models").rstrip("s")

    def repository(self, *, write: bool = False) -> Repository:
        found = self.hub.repositories.get((self.kind, self.parts["repo"]))
        self._check(found, write)
        assert found is not None
        return found

    def bucket(self, *, write: bool = False) -> Bucket:
        found = self.hub.buckets.get(self.parts["repo"])
        self._check(found, write)
        assert found is not None
        return found

    def _check(self, found: Repository | Bucket | None, write: bool) -> None:
        if found is None or (found.private and not self.may("read", found.name)):
            raise Refused(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and not self.may("write", found.name):
            raise Refused(403, "Forbidden: you must use a write token to write to a repository")

    def may(self, what: str, name: str) -> bool:
        owner, user = name.split("/")[0], self.user
        if user is None:
            return False
        orgs = {org["name"]: org.get("roleInOrg", "write") for org in user.get("orgs", [])}
        role = "admin" if owner == user["name"] else orgs.get(owner)
        token = user["auth"]["accessToken"]["role"]
        if what == "read":
            return role is not None
        return role in ("admin", "write", "contributor") and token in ("write", "fineGrained")

    def commit_of(self, repository: Repository) -> str:
        revision = self.parts.get("revision") or "main"
        found = repository.resolve(revision)
        if found is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found


def whoami(call: Call) -> Answer:
    if call.user is None:
        raise Refused(401, "Invalid credentials in Authorization header")
    return as_json({"type": "user", "fullname": call.user["name"], "orgs": [], **call.user})


def harnesses(_: Call) -> Answer:
    """The client asks once a day which programs may be driving it, for its user agent."""
    return as_json({"standardEnvVars": [], "harnesses": {}})


def validate(call: Call) -> Answer:
    mistakes = card_mistakes(call.data["content"])
    told = {"errors": [{"message": text} for text in mistakes], "warnings": []}
    return as_json(told, 400 if mistakes else 200)


def create(call: Call) -> Answer:
    asked, user = call.data, call.user
    if user is None:
        raise Refused(401, "Invalid credentials in Authorization header")
    name, kind = f"{asked.get('organization') or user['name']}/{asked['name']}", asked.get("type") or "model"
    url = f"{call.hub.url}/{'' if kind == 'model' else kind + 's/'}{name}"
    if not call.may("write", name):
        owner = name.split("/")[0]
        raise Refused(403, f'You don\'t have the rights to create a {kind} under the namespace "{owner}"')
    if (kind, name) in call.hub.repositories:
        raise Refused(409, f"You already created this {kind} repo", url=url)
    call.hub.add(name, private=_asked_for_private(asked), kind=kind)
    return as_json({"url": url, "name": name, "id": git_object("blob", name.encode())[:24]})


def delete(call: Call) -> Answer:
    asked, user = call.data, call.user or {"name": ""}
    name = f"{asked.get('organization') or user['name']}/{asked['name']}"
    if (asked.get("type") or "model", name) not in call.hub.repositories:
        raise Refused(404, "Repository not found", "RepoNotFound")
    if not call.may("write", name):
        raise Refused(403, "Forbidden: you must use a write token to delete a repository")
    del call.hub.repositories[asked.get("type") or "model", name]
    return as_json({"ok": True})


def info(call: Call) -> Answer:
    repository = call.repository()
    oid = call.commit_of(repository)
    commit = repository.commits[oid]
    return as_json(
        {
            "_id": git_object("blob", repository.name.encode())[:24],
            "id": repository.name,
            "modelId": repository.name,
            "author": repository.name.split("/")[0],
            "sha": oid,
            "lastModified": commit.date,
            "createdAt": commit.date,
            "private": repository.private,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "cardData": card_values(commit.files["README.md"].content.decode()) if "README.md" in commit.files else {},
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }
    )


def preupload(call: Call) -> Answer:
    repository = call.repository(write=True)
    present, told = repository.commits[call.commit_of(repository)].files, []
    for file in call.data["files"]:
        binary = b"\0" in base64.b64decode(file["sample"])
        large = file["path"].endswith(LARGE) or file["size"] > LARGE_BYTES or binary
        line = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
        if (there := present.get(file["path"])) is not None:
            line["oid"] = there.sha256 or there.oid
        told.append(line)
    return as_json({"files": told, "commitOid": call.commit_of(repository)})


def commit(call: Call) -> Answer:
    repository = call.repository(write=True)
    head, branch, header = call.commit_of(repository), call.parts["revision"], {}
    if branch not in repository.branches:
        raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
    files = dict(repository.commits[head].files)
    for line in map(json.loads, call.body.splitlines()):
        value = line["value"]
        if line["key"] == "header":
            header = value
        else:
            _change(call.hub, files, line["key"], value, spoilt=call.spoilt)
    if not head.startswith(header.get("parentCommit") or ""):
        raise Refused(412, "The branch has been updated since your parent commit")
    made = repository.commit(branch, files, header["summary"], header.get("description", ""))
    return as_json({"success": True, "commitOid": made, "commitUrl": f"{call.hub.url}/{repository.name}/commit/{made}"})


def _change(hub: Hub, files: dict[str, Blob], key: str, value: dict[str, Any], *, spoilt: bool) -> None:
    path = value["path"]
    if key == "file":
        content = base64.b64decode(value["content"])
        files[path] = Blob(flip(content) if spoilt else content, size=len(content))
    elif key == "lfsFile":
        if not hub.knows_large(value["oid"]):
            raise Refused(400, f"LFS pointer of {path} pointed to a file that does not exist")
        files[path] = Blob.pointer(value["oid"], value["size"])
    else:
        gone = [name for name in files if name == path or name.startswith(path.rstrip("/") + "/")]
        if not gone:
            raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del files[name]


def branch(call: Call) -> Answer:
    repository, name = call.repository(write=True), call.parts["revision"]
    if call.method == "DELETE":
        repository.branches.pop(name)
    elif name in repository.branches:
        raise Refused(409, f"Reference already exists: {name}")
    else:
        start = repository.resolve(call.data.get("startingPoint", "main"))
        if start is None:
            raise Refused(404, "Invalid rev id", "RevisionNotFound")
        repository.branches[name] = start
    return as_json({})


def tag(call: Call) -> Answer:
    repository = call.repository(write=True)
    if call.data["tag"] in repository.tags:
        raise Refused(409, "Tag already exists")
    repository.tags[call.data["tag"]] = call.commit_of(repository)
    return as_json({})


def refs(call: Call) -> Answer:
    repository = call.repository()

    def listed(kind: str, named: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": oid} for name, oid in named.items()]

    found = {"branches": listed("heads", repository.branches), "tags": listed("tags", repository.tags)}
    return as_json(found | {"converts": []})


def commits(call: Call) -> Answer:
    repository, author = call.repository(), [{"user": call.parts["repo"].split("/")[0]}]
    told = [
        {"id": oid, "title": made.title, "message": made.description, "authors": author, "date": made.date}
        for oid, made in repository.history(call.commit_of(repository))
    ]
    return as_json(told, headers={"X-Total-Count": str(len(told))})


def settings(call: Call) -> Answer:
    repository = call.repository(write=True)
    repository.private = _asked_for_private(call.data)
    return as_json({"private": repository.private})


def _asked_for_private(asked: dict[str, Any]) -> bool:
    """`visibility` of today's clients, `private` of huggingface_hub 1.5."""
    return asked.get("visibility") == "private" or asked.get("private") is True


def tree(call: Call) -> Answer:
    repository, folder = call.repository(), call.parts.get("path") or ""
    files = repository.commits[call.commit_of(repository)].files
    inside, deep = f"{folder}/" if folder else "", call.query.get("recursive", "").lower() == "true"
    below = {path: blob for path, blob in files.items() if path.startswith(inside)}
    if folder and not below:
        raise Refused(404, f"{folder} does not exist", "EntryNotFound")
    folders = [
        {"type": "directory", "oid": oid, "size": 0, "path": path}
        for path, oid in sorted(tree_oids(files).items())
        if path.startswith(inside) and path not in ("", folder) and (deep or "/" not in path[len(inside) :])
    ]
    shown = {path: blob for path, blob in sorted(below.items()) if deep or "/" not in path[len(inside) :]}
    return as_json([*folders, *(_entry(path, blob) for path, blob in shown.items())])


def paths(call: Call) -> Answer:
    """Of the named files, hash and size; a path that is not there is left out."""
    repository = call.repository()
    files = repository.commits[call.commit_of(repository)].files
    form = call.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")
    wanted = [value for key, value in parse_qsl(call.body.decode()) if key == "paths"] if form else call.data["paths"]
    found = {path: blob for path, blob in files.items() if path in wanted}
    if call.spoilt:
        found = {path: _another(blob) for path, blob in found.items()}
    return as_json([_entry(path, blob) for path, blob in found.items()])


def _another(blob: Blob) -> Blob:
    return Blob(flip(blob.content), blob.sha256 and hashlib.sha256(blob.sha256.encode()).hexdigest(), blob.size)


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    large = {"oid": blob.sha256, "size": blob.size, "pointerSize": len(blob.content)}
    plain = {"type": "file", "oid": blob.oid, "size": blob.size or len(blob.content), "path": path}
    return plain | ({"lfs": large} if blob.sha256 else {})


def xet_token(call: Call) -> Answer:
    """Where large files lie; the write path reads the body, the read path the headers."""
    if call.kind == "bucket":
        call.bucket(write=call.parts["way"] == "write")
    else:
        call.repository(write=call.parts["way"] == "write")
    until, where = int(time.time()) + 3600, f"local://{call.hub.store}"
    headers = {"X-Xet-Cas-Url": where, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(until)}
    return as_json({"accessToken": "xet", "exp": until, "casUrl": where}, headers=headers)


def lfs_batch(call: Call) -> Answer:
    call.repository(write=True)
    told = []
    for wanted in call.data["objects"]:
        line, where = {"oid": wanted["oid"], "size": wanted["size"]}, f"{call.hub.files_url}/{wanted['oid']}"
        if wanted["oid"] not in call.hub.large:
            verify = f"{call.hub.url}/api/lfs-verify"
            line["actions"] = {"upload": {"href": where, "header": {}}, "verify": {"href": verify, "header": {}}}
        told.append(line)
    return as_json({"transfer": "basic", "objects": told}, headers={"Content-Type": "application/vnd.git-lfs+json"})


def lfs_upload(call: Call) -> Answer:
    """The client's token has no business here: the store is signed by its address alone."""
    content = flip(call.body) if call.spoilt else call.body
    if "authorization" in call.headers:
        raise Refused(400, "a token was sent to the file store")
    if hashlib.sha256(content).hexdigest() != call.parts["oid"]:
        raise Refused(400, "the content's sha256 is not the one that was announced")
    call.hub.large[call.parts["oid"]] = content
    return Answer(200, headers={"ETag": f'"{call.parts["oid"]}"'})


def lfs_verify(call: Call) -> Answer:
    if len(call.hub.large.get(call.data["oid"], b"")) != call.data["size"]:
        raise Refused(404, "the file has not arrived")
    return as_json({})


def download(call: Call) -> Answer:
    content = call.hub.large.get(call.parts["oid"])
    if "authorization" in call.headers:
        raise Refused(400, "a token was sent to the file store")
    if content is None:
        raise Refused(404, "no such file")
    content = flip(content) if call.spoilt else content
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("range", ""))
    if wanted is None:
        return Answer(200, content, {"Accept-Ranges": "bytes"})
    first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
    return Answer(206, content[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(content)}"})


def resolve(call: Call) -> Answer:
    repository = call.repository()
    oid = call.commit_of(repository)
    blob = repository.commits[oid].files.get(call.parts["path"])
    headers = {"X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
    if blob is None:
        refused = Refused(404, "Entry not found", "EntryNotFound").answer
        return Answer(404, refused.body, refused.headers | headers)
    if blob.sha256 is None:
        content = flip(blob.content) if call.spoilt else blob.content
        return Answer(200, content, headers | {"ETag": f'"{blob.oid}"', "Content-Type": "text/plain; charset=utf-8"})
    linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
    linked["Location"] = f"{call.hub.files_url}/{blob.sha256}"
    if blob.sha256 not in call.hub.large and call.hub.store is not None:
        kind = "models" if call.kind == "model" else f"{call.kind}s"
        linked["X-Xet-Hash"] = xet_hash(call.hub.store, blob.sha256) or ""
        linked["X-Xet-Refresh-Route"] = f"{call.hub.url}/api/{kind}/{repository.name}/xet-read-token/{oid}"
    return Answer(302, b"", headers | linked)


BUCKET_PAGE = 1000  # entries of one page of a bucket's tree


def bucket_info(call: Call) -> Answer:
    bucket, sizes = call.bucket(), _sizes(call)
    told: dict[str, Any] = {"id": bucket.name, "private": bucket.private, "createdAt": "2026-02-06T17:37:57.000Z"}
    told |= {"size": sum(sizes[each] for each in bucket.files.values()), "totalFiles": len(bucket.files)}
    return as_json(told)


def bucket_tree(call: Call) -> Answer:
    """Pages of what begins with the prefix, by its letters: `logs` names `logs.json` and `logs_old/` too. Without
    `recursive`, what is in a folder below the prefix is one entry, the folder."""
    deep = call.query.get("recursive", "").lower() == "true"
    files, prefix, shown = call.bucket().files, call.parts.get("path") or "", dict[str, str | None]()
    for path, xet in sorted(files.items()):
        slash = path.find("/", len(prefix) + 1)
        if path.startswith(prefix) and slash >= 0 and not deep:
            shown[path[:slash]] = None
        elif path.startswith(prefix):
            shown[path] = xet
    first, sizes = int(call.query.get("cursor", 0)), _sizes(call)
    page = list(shown.items())[first : first + BUCKET_PAGE]
    headers = {}
    if first + BUCKET_PAGE < len(shown):
        here = f"{call.hub.url}/api/buckets/{call.parts['repo']}/tree/{quote(prefix, safe='')}"
        headers["Link"] = f'<{here}?recursive={deep}&cursor={first + BUCKET_PAGE}>; rel="next"'
    folder_entry = {"type": "directory", "uploadedAt": "2026-02-06T17:37:57.000Z"}
    told = [folder_entry | {"path": path} if xet is None else _stored(path, xet, sizes) for path, xet in page]
    return as_json(told, headers=headers)


def bucket_paths(call: Call) -> Answer:
    """Hash and size of the named files; a path that is not there is left out."""
    files, sizes = call.bucket().files, _sizes(call)
    return as_json([_stored(path, files[path], sizes) for path in call.data["paths"] if path in files])


def _stored(path: str, xet: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": sizes[xet], "xetHash": xet, "mtime": "2026-02-06T17:37:57.000Z"}


def _sizes(call: Call) -> dict[str, int]:
    assert call.hub.store is not None, "buckets need a Xet store"
    return {file.hash: file.size for file in xet_files(call.hub.store)}


def bucket_batch(call: Call) -> Answer:
    """One operation after the other. A part that fails is told in a 200, as the Hub does, and the rest is done."""
    bucket, sizes, failed, done = call.bucket(write=True), _sizes(call), list[dict[str, str]](), 0
    for line in map(json.loads, call.body.splitlines()):
        path = line["path"]
        if call.spoilt:
            failed.append({"path": path, "error": "could not be applied"})
        elif line["type"] == "deleteFile":
            bucket.files.pop(path, None)
            done += 1
        elif line["type"] != "addFile" or line["xetHash"] not in sizes:
            failed.append({"path": path, "error": "this content was not uploaded"})
        else:
            bucket.files[path] = line["xetHash"]
            done += 1
    told = {"success": not failed, "processed": done + len(failed), "succeeded": done, "failed": failed}
    return as_json(told, 200 if done else 422)


def bucket_resolve(call: Call) -> Answer:
    bucket, path = call.bucket(), call.parts["path"]
    if path not in bucket.files:
        raise Refused(404, "Entry not found", "EntryNotFound")
    xet = bucket.files[path]
    headers = {"X-Xet-Hash": xet, "X-Linked-Size": str(_sizes(call)[xet])}
    headers["X-Xet-Refresh-Route"] = f"{call.hub.url}/api/buckets/{bucket.name}/xet-read-token"
    return Answer(302, b"", headers | {"Location": f"{call.hub.files_url}/{xet}"})


REPO = r"(?P<repo>[^/]+/[^/]+)"
API = rf"/api/(?P<kind>models|datasets)/{REPO}"
REVISION = r"(?P<revision>[^/]+)"
BUCKET = rf"/api/(?P<kind>buckets)/{REPO}"
ROUTES: Sequence[tuple[str, str, str, Any]] = [
    ("GET", "/api/whoami-v2", "whoami", whoami),
    ("GET", "/api/agent-harnesses", "harnesses", harnesses),
    ("POST", "/api/validate-yaml", "validate", validate),
    ("POST", "/api/repos/create", "create", create),
    ("DELETE", "/api/repos/delete", "delete", delete),
    ("GET", API, "info", info),
    ("GET", rf"{API}/revision/{REVISION}", "info", info),
    ("POST", rf"{API}/preupload/{REVISION}", "preupload", preupload),
    ("POST", rf"{API}/commit/{REVISION}", "commit", commit),
    ("POST", rf"{API}/branch/{REVISION}", "branch", branch),
    ("DELETE", rf"{API}/branch/{REVISION}", "branch", branch),
    ("POST", rf"{API}/tag/{REVISION}", "tag", tag),
    ("GET", rf"{API}/refs", "refs", refs),
    ("GET", rf"{API}/commits/{REVISION}", "commits", commits),
    ("PUT", rf"{API}/settings", "settings", settings),
    ("GET", rf"{API}/tree/{REVISION}(?:/(?P<path>.+))?", "tree", tree),
    ("POST", rf"{API}/paths-info/{REVISION}", "paths", paths),
    ("GET", rf"{API}/xet-(?P<way>read|write)-token/{REVISION}", "xet_token", xet_token),
    ("POST", rf"/(?:(?P<kind>datasets)/)?{REPO}\.git/info/lfs/objects/batch", "lfs_batch", lfs_batch),
    ("POST", "/api/lfs-verify", "lfs_verify", lfs_verify),
    ("PUT", "/(?P<oid>[0-9a-f]{64})", "lfs_upload", lfs_upload),
    ("GET", "/(?P<oid>[0-9a-f]{64})", "download", download),
    ("GET", BUCKET, "bucket_info", bucket_info),
    ("GET", rf"{BUCKET}/tree(?:/(?P<path>.+))?", "bucket_tree", bucket_tree),
    ("POST", rf"{BUCKET}/paths-info", "bucket_paths", bucket_paths),
    ("POST", rf"{BUCKET}/batch", "bucket_batch", bucket_batch),
    ("GET", rf"{BUCKET}/xet-(?P<way>read|write)-token", "xet_token", xet_token),
    ("GET", rf"/(?P<kind>buckets)/{REPO}/resolve/(?P<path>.+)", "bucket_resolve", bucket_resolve),
    ("GET", rf"/(?:(?P<kind>datasets)/)?{REPO}/resolve/{REVISION}/(?P<path>.+)", "resolve", resolve),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing to the terminal: the log is the test's."""

    def do(self) -> None:
        address, method = urlsplit(self.path), "GET" if self.command == "HEAD" else self.command
        name, work, parts = self._route(method, address.path)
        with self.hub.lock:
            fault = self.hub.take_fault(name)
        if fault is not None and fault.cut_request_at is not None:
            self.rfile.read(min(fault.cut_request_at, int(self.headers.get("Content-Length") or 0)))
            return self._drop(name)
        body, headers = self._body(), {key.lower(): value for key, value in self.headers.items()}
        spoilt = fault is not None and fault.wrong_hash
        call = Call(self.hub, method, parts, dict(parse_qsl(address.query)), headers, body, spoilt)
        with self.hub.lock:
            answer = _answered(call, work, fault)
            line = Request(name, self.command, self.path, headers, body, answer.status)
            self.hub.log.append(line)
        self._send(answer, fault.cut_answer_at if fault else None)
        return None

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do  # noqa: N815  # the standard library's names

    def _route(self, method: str, path: str) -> tuple[str, Any, dict[str, str]]:
        for verb, pattern, name, work in ROUTES:
            if verb == method and (found := re.fullmatch(pattern, path)) is not None:
                return name, work, {key: unquote(value) for key, value in found.groupdict().items() if value}
        return "unknown", None, {}

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _send(self, answer: Answer, cut_at: int | None) -> None:
        self.send_response(answer.status)
        for key, value in (answer.headers | {"Content-Length": str(len(answer.body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if cut_at is not None:
            self.wfile.write(answer.body[:cut_at])
            self.wfile.flush()
            return self._close()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        return None

    def _drop(self, name: str) -> None:
        self.hub.log.append(Request(name, self.command, self.path, dict(self.headers), b"", 0))
        self._close()

    def _close(self) -> None:
        """Ends the connection as a broken line does: reset, not a polite end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def _answered(call: Call, work: Any, fault: Fault | None) -> Answer:
    if work is None:
        return Refused(501, f"the loopback Hub has no such call: {call.method}").answer
    try:
        if fault is not None and fault.status is not None:
            raise Refused(fault.status, fault.message or f"fault {fault.status} on demand", fault.code)
        return work(call)
    except Refused as refused:
        after = {} if fault is None or fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        return Answer(refused.answer.status, refused.answer.body, refused.answer.headers | after)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that went away, or a connection cut on demand, is no news."""


WRITER = {"name": "me", "auth": {"accessToken": {"displayName": "tests", "role": "write"}}}
TOKEN = "hf_" + "loopback" * 4


@contextmanager
def running_hub(*, store: Path | None = None, users: dict[str, dict[str, Any]] | None = None) -> Iterator[Hub]:
    """A Hub that answers until the block ends; without `users` one token, TOKEN, that may write as `me`."""
    hub = Hub(users if users is not None else {TOKEN: WRITER}, store)
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    servers = [_Quiet(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.url, hub.files_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
