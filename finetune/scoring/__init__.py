"""Scores for a model's answers, each between 0 and 1, and intervals for their means.

    texts.py        exact, normalized, contains, number, choice, regex, chrf
    numerals.py     the last number of a text
    letters.py      the letter that an answer chooses
    structured.py   json_valid, json_fields, tool_name, tool_call
    sql.py          execution accuracy, in a child process (sql_child.py)
    function.py     a Python function of the user's own
    metrics.py      a metric's name to its scorer; the metrics that fit a data set
    intervals.py    95 % intervals
    general.py      the general set, general.jsonl: what was forgotten? (sources: general_licences.txt)

No module here imports torch: answers come as texts.

May import: recipe, files, errors and below.
"""
