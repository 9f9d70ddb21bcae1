"""The file system above the chunk store, as decisions: each operation is a body over one transaction of a key-value
store (`docs/design/0028-meta-transactions.md`). `dispatch.carry_out` is the door."""
