"""`/openapi.json` and `/docs`, written once."""

from functools import cache

import msgspec
from fastapi import APIRouter, Request, Response

from server.openapi import build_document, write_page
from server.service import service_of

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    service = service_of(request)
    return Response(_written(service.model_name, bool(service.key_digests))[0], media_type="application/json")


@router.get("/docs")
async def docs(request: Request) -> Response:
    service = service_of(request)
    return Response(_written(service.model_name, bool(service.key_digests))[1], media_type="text/html")


@cache
def _written(model_name: str, has_keys: bool) -> tuple[bytes, str]:
    document = build_document(model_name, has_keys)
    return msgspec.json.encode(document), write_page(document)
