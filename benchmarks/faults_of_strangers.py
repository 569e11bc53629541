"""Faults in what is read of a stranger's model: folders, headers, templates, code.

`python benchmarks/seeded_faults.py` seeds them; each names the tests that must notice.
"""

from __future__ import annotations

from benchmarks.common import Fault

CORPUS = "corpus/test_corpus.py"
HEADER = "untrusted/test_safetensors_header.py"
CHILDREN = "untrusted/test_children.py"
OUTPUT = "untrusted/test_output.py"
CODE = "untrusted/test_model_code.py"

OF_MODELS = (
    Fault(
        "an index may name pickles",
        "untrusted/model_folder.py",
        'plain = name.endswith(".safetensors") and not',
        "plain = not",
        f"{CORPUS} -k index_p",
    ),
    Fault(
        "an index may name files of other folders",
        "untrusted/model_folder.py",
        " and Path(name).name == name",
        "",
        f"{CORPUS} -k index",
    ),
    Fault(
        "weights of integers are cast",
        "untrusted/model_folder.py",
        "if facts.dtype not in FLOATS and not _is_a_buffer(name, facts):",
        "if False:",
        f"{CORPUS} -k stored_as",
    ),
    Fault(
        "an adapter may lie beside a model",
        "untrusted/model_folder.py",
        "if (folder / ADAPTER_CONFIG).exists() and (folder / CONFIG).exists():",
        "if False:",
        f"{CORPUS} -k beside",
    ),
    Fault(
        "tensors of a file may overlap",
        "untrusted/safetensors_header.py",
        "        if begin != at:\n",
        "        if begin > at:\n",
        f"{CORPUS} -k weights",
    ),
    Fault(
        "a tensor's bytes need not be those of its shape",
        "untrusted/safetensors_header.py",
        "!= 8 * (end - begin):",
        "> 8 * (end - begin):",
        f"{CORPUS} -k weights",
    ),
    Fault(
        "a header may be of any length",
        "untrusted/safetensors_header.py",
        "length > min(MOST_HEADER, size - LENGTH_BYTES):",
        "length > size - LENGTH_BYTES:",
        HEADER,
    ),
    Fault(
        "a file's JSON may be of any depth",
        "untrusted/json_files.py",
        "    if depth_of(value) > MOST_DEPTH:\n",
        "    if False:\n",
        f"{CORPUS} -k deep",
    ),
    Fault(
        "a key may stand twice in a header",
        "untrusted/json_files.py",
        "object_pairs_hook=_unique_keys if unique else None",
        "object_pairs_hook=None",
        f"{CORPUS} -k twice",
    ),
    Fault(
        "sizes of a configuration have no upper bound",
        "untrusted/config_sizes.py",
        "<= value <= most:",
        "<= value:",
        f"{CORPUS} -k huge_vision",
    ),
    Fault(
        "sizes of a model's parts are not looked at",
        "untrusted/config_sizes.py",
        'yield f"{name}: ", section',
        "pass",
        f"{CORPUS} -k text_config",
    ),
    Fault(
        "heads need not be a multiple of those they share",
        "untrusted/config_sizes.py",
        "and heads % shared:",
        "and False:",
        f"{CORPUS} -k heads_clash",
    ),
    Fault(
        "a git-lfs pointer is taken for the file",
        "untrusted/kinds.py",
        '(b"version https://git-lfs"',
        '(b"version of another"',
        f"{CORPUS} -k pointer",
    ),
    Fault(
        "a device is opened as a file",
        "paths.py",
        "    if kind == stat.S_IFREG:",
        "    if kind in (stat.S_IFREG, stat.S_IFCHR):",
        OUTPUT,
    ),
)

OF_PROGRAMS = (
    Fault(
        "a child may take any memory",
        "untrusted/children.py",
        "    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))\n",
        "",
        CHILDREN,
    ),
    Fault(
        "what was refused is trusted the next time",
        "untrusted/children.py",
        'if process.returncode == 0 and word[0] == "ok":',
        "if process.returncode == 0:",
        CHILDREN,
    ),
    Fault(
        "another file is trusted by the first one's hash",
        "untrusted/children.py",
        "known_by or asked",
        "known_by",
        CHILDREN,
    ),
    Fault(
        "a template is not tried with the prompt for an answer",
        "untrusted/programs.py",
        "for prompt in (False, True):",
        "for prompt in (False,):",
        CHILDREN,
    ),
    Fault(
        "a template is not tried with tools",
        "untrusted/programs.py",
        "for tools in (None, [tool]):",
        "for tools in (None,):",
        CHILDREN,
    ),
    Fault(
        "a template is tried with a short chat alone",
        "untrusted/programs.py",
        ', [{"role": "system", "content": "s"}, *turns * 16]):',
        "):",
        CHILDREN,
    ),
    Fault(
        "a repeated group cannot be slow",
        "untrusted/programs.py",
        "len(pattern) < 10_000 and groups is None and",
        "len(pattern) < 10_000 and",
        CHILDREN,
    ),
    Fault(
        "code of a stranger's run may run",
        "untrusted/model_code.py",
        'if os.environ.get(CONSENT) != "1" and not is_trusted(_key(name, revision)):',
        "if False:",
        f"{CODE} -k strangers_run",
    ),
    Fault(
        "code that was changed stays trusted",
        "untrusted/model_code.py",
        'sorted(folder.glob("*.py")) if folder.is_dir() else []',
        "[]",
        f"{CODE} -k until_its_code",
    ),
)

FAULTS_OF_STRANGERS = OF_MODELS + OF_PROGRAMS
