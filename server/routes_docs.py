"""`/openapi.json` and `/docs`, written when they change."""

from functools import cache

import msgspec
from fastapi import APIRouter, Request, Response

from server.openapi import build_document, write_page
from server.service import Service, service_of

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return Response(_of(service_of(request))[0], media_type="application/json")


@router.get("/docs")
async def docs(request: Request) -> Response:
    return Response(_of(service_of(request))[1], media_type="text/html")


def _of(service: Service) -> tuple[bytes, str]:
    limits = service.supervisor.limits
    return _written(service.model_name, () if limits is None else tuple(limits.profiles), bool(service.key_digests))


@cache
def _written(model_name: str, profiles: tuple[str, ...], has_keys: bool) -> tuple[bytes, str]:
    document = build_document(model_name, profiles, has_keys)
    return msgspec.json.encode(document), write_page(document)
