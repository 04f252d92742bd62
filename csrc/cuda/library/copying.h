// The table's functions that copy between a device and the host.
#pragma once

#include "base/cuda_table.h"
#include "cuda/driver/stream.h"

namespace farandole::cuda {

const StreamRef& stream_to_host_of(const CudaQueue& queue);

void add_copying(CudaTable& table);

}  // namespace farandole::cuda
