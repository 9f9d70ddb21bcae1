"""Wire formats of token rows: bf16, FP8 in tiles, E5M6, LogFMT.

`token_codec` makes a `TokenCodec`, by name; what `codecs` and `twins` name besides may change.
"""

from fireflyer.collectives.tokens.codecs import TOKEN_CODECS, TileCodec, TokenCodec, ValueCodec, token_codec

__all__ = ["TOKEN_CODECS", "TileCodec", "TokenCodec", "ValueCodec", "token_codec"]
