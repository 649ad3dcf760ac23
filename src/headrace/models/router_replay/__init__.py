"""Router replay: the experts that a rollout used, used again by another forward of a mixture-of-experts model.

>>> replay = install(model)
>>> routes = Routes.record()
>>> model(input_ids=ids, routes=routes)
>>> model(input_ids=ids, routes=Routes.replay(routes.ids))
"""

from headrace.data_plane.routes_codec import check_routes, route_digest, row_digests
from headrace.models.router_replay.agreement import Agreement, route_agreement
from headrace.models.router_replay.align import AlignedRoutes, align_jagged, align_packed, align_padded
from headrace.models.router_replay.families import RouterSpec
from headrace.models.router_replay.handle import RouterReplay
from headrace.models.router_replay.install import install
from headrace.models.router_replay.layer_map import LayerMap
from headrace.models.router_replay.receipts import Receipt
from headrace.models.router_replay.routes import Routes
from headrace.models.router_replay.trace import RouteDifference, find_difference

__all__ = [
    "Agreement",
    "AlignedRoutes",
    "LayerMap",
    "Receipt",
    "RouteDifference",
    "RouterReplay",
    "RouterSpec",
    "Routes",
    "align_jagged",
    "align_packed",
    "align_padded",
    "check_routes",
    "find_difference",
    "install",
    "route_agreement",
    "route_digest",
    "row_digests",
]
