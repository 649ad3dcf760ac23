"""Router replay: the experts that a rollout used, used again by another forward of a mixture-of-experts model.

>>> replay = install(model)
>>> routes = Routes.record()
>>> recorded = model(input_ids=ids, routes=routes)
>>> replayed = model(input_ids=ids, routes=Routes.replay(routes.ids))
"""

from headrace.data_plane.routes_codec import check_routes, route_digest, row_digests
from headrace.models.router_replay.align import AlignedRoutes, align_jagged, align_packed, align_padded
from headrace.models.router_replay.diagnosis import RouteDifference, find_difference
from headrace.models.router_replay.handle import LayerMap, RouterReplay, RouterSpec
from headrace.models.router_replay.modules import install
from headrace.models.router_replay.routes import Routes
from headrace.models.router_replay.stats import ReplayStats, route_agreement

__all__ = [
    "AlignedRoutes",
    "LayerMap",
    "ReplayStats",
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
