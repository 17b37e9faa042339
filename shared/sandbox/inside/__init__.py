"""The only project code that lies inside a sandbox (with shared/problems/values.py): standard library, nothing else.

`nursery` holds a warm interpreter and starts a confined child per run; `confine` is what the child takes from itself;
`harness` runs the candidate's calls in it.
"""
