"""Training in parallel: communication that is waited for, dispatch of tokens, codecs, the pipeline's executor."""
