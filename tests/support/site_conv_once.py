"""Cases of convolutions whose tiles copy all that they read at once."""

from sbnet_cupy.submanifold.site_conv_instances import OncePlan
from sbnet_cupy.submanifold.site_conv_plan import ONCE_PLANS
from support.site_conv_cases import SiteConvCase as Case

CASES = [
    Case(channels=64, channels_out=64, sites=100, spare=9),
    Case("bfloat16", channels=24, channels_out=72, sites=200, residual=False, activation="silu"),
    Case("float32", channels=20, channels_out=36, precision="tf32", activation=None, spare=3),
    Case("float16", channels=8, channels_out=8, kernel=(5, 5), sites=130, tables=False),
    Case("float16", channels=16, channels_out=40, kernel=(3, 3, 3), sites=300),
    Case("float16", channels=24, channels_out=32, kernel=(2, 3), kind="strided"),
    Case("bfloat16", channels=16, channels_out=24, kernel=(3, 2), kind="transposed", spare=7),
    Case("float16", channels=8, channels_out=16, kernel=(1,), sites=1),
    Case("float16", channels=40, channels_out=48, whole=False, activation="gelu"),
]
PLANS = (
    *ONCE_PLANS, OncePlan((16, 64), (1, 2)), OncePlan((32, 64), (2, 2)), OncePlan((64, 32), (4, 1)),
)  # fmt: skip
GIVEN = [(plan, CASES[i % len(CASES)]) for i, plan in enumerate(PLANS * 4)]
GIVEN.append((ONCE_PLANS[-1], Case(channels=32, channels_out=32, kernel=(3, 3, 3), sites=130)))
RANDOM = Case("float16", 150, 40, 40, (3, 3), whole=False, spare=4)
