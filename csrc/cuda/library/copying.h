// The table's functions that copy between a device and the host.
#pragma once

#include "base/cuda_table.h"

namespace farandole::cuda {

void add_copying(CudaTable& table);

}  // namespace farandole::cuda
