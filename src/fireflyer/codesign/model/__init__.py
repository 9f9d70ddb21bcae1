"""Parameters, FLOPs, memory and KV cache of a model, computed from its dimensions.

shape = shape_from_config(json.loads(text_of_config_json))
count_parameters(shape).active, training_flops(shape, 4096), kv_bytes_per_token(shape)
"""

from fireflyer.codesign.model.config import shape_from_config
from fireflyer.codesign.model.flops import dense_flops, model_flops_utilization, training_flops
from fireflyer.codesign.model.keys import ConfigKeys
from fireflyer.codesign.model.kv_cache import kv_bytes_per_sequence, kv_bytes_per_token, kv_bytes_read
from fireflyer.codesign.model.parameters import ParameterCount, count_parameters
from fireflyer.codesign.model.shape import Attention, Experts, LatentAttention, ModelShape, TokenIndex

__all__ = [
    "Attention",
    "ConfigKeys",
    "Experts",
    "LatentAttention",
    "ModelShape",
    "ParameterCount",
    "TokenIndex",
    "count_parameters",
    "dense_flops",
    "kv_bytes_per_sequence",
    "kv_bytes_per_token",
    "kv_bytes_read",
    "model_flops_utilization",
    "shape_from_config",
    "training_flops",
]
