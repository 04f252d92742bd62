// The table's functions for exchanges between devices.
#pragma once

#include "base/cuda_table.h"

namespace farandole::cuda {

void add_exchanging(CudaTable& table);

}  // namespace farandole::cuda
