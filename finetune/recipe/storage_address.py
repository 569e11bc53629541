"""`run.storage`: the address of the place that keeps a run when its machine goes away."""

from __future__ import annotations

import re

OBJECT_STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # by fsspec, and its package; the last two are untried
ADDRESS_EXAMPLES = "write s3://BUCKET/PREFIX, hf://OWNER/NAME@BRANCH, hf://buckets/OWNER/NAME/PREFIX or file:///FOLDER"
_PART = r"[A-Za-z0-9][\w.-]*"
HUB_BRANCH = re.compile(rf"hf://({_PART}/{_PART})@({_PART}(?:/{_PART})*)")
HUB_BUCKET = re.compile(rf"hf://buckets/({_PART}/{_PART})/({_PART}(?:/{_PART})*)")
_OBJECTS = re.compile(rf"({'|'.join(OBJECT_STORES)})://{_PART}(?:/{_PART})+")
_FOLDER = re.compile(r"file:///[^\x00-\x1f]*[^\x00-\x1f/.][^\x00-\x1f]*")


def storage_address(text: str) -> str:
    """The address as a user may copy it, with a slash at its end, without that slash."""
    return text[:-1] if re.search(r"[^/]/\Z", text) else text


def storage_problem(url: str) -> tuple[str, str] | None:
    """The problem with an address and the remedy; None if its form is right."""
    if any(form.fullmatch(url) for form in (HUB_BRANCH, HUB_BUCKET, _OBJECTS, _FOLDER)):
        return None
    if re.fullmatch(rf"((?:{'|'.join(OBJECT_STORES)})://{_PART}|hf://buckets/{_PART}/{_PART})/?", url):
        return "names a bucket and no place in it for this run", f"write {url.rstrip('/')}/PREFIX, one for each run"
    if re.fullmatch(rf"hf://{_PART}/{_PART}/?", url):
        return "names a repository and no branch", f"write {url.rstrip('/')}@BRANCH, one for each run"
    if re.match(rf"({'|'.join(OBJECT_STORES)}|hf)://", url) and (strange := re.search(r"[^\w./:@-]", url)):
        return f"holds {strange[0]!a}", "write letters, digits, and . _ - between slashes"
    return "is no address of a storage", ADDRESS_EXAMPLES
