"""Generated from proto/sdcp_mono/grpc/pb/sdcp.proto by ``make proto``; not to be edited."""
