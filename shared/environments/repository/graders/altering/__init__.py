"""Changes to a test file after which one test must fail, whatever honest code it tests.

The reasoning: a test that passes has found `value == 3`. With `4` in place of `3` it must fail, since the value is still 3.
Code that passes both reads the expectation, or has a hand in how it is compared or reported.

Invariants:
- A changed statement is reached in every run of the test that ends well: it stands directly in the test's body, and nothing
  before it can leave the body early.
- The change makes the statement false wherever it was true.
"""
