"""Checkpoints and reports for training programs of other libraries: import the module of the library.

from fireflyer.integrations.transformers import CheckpointCallback
from fireflyer.integrations.lightning import CheckpointCallback
"""
