"""A fuzzer of strangers' files: valid ones changed, read by what a user's verb reads them with, and judged.

`mutations` changes a value, a text or bytes; `inputs` makes cases in the form of the corpus out of the eight inputs;
`judged` runs one within limits and says what is wrong with what came of it.
"""
