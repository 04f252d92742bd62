// Memory at addresses of a multicast object, to which several devices have bound theirs: a load
// folds what all of them have there, in an order of the switch's own; a store reaches all. Nothing
// but these accessors may use such an address, and they no other one. They need compute capability
// 9.0; device.h has the rest of the machine.
//
// Accesses by a device's other instructions, at its own addresses of the same memory, are ordered
// by the ends of kernels, and by order_addresses().
#pragma once

#include "cuda/kernels/units.cuh"

namespace farandole::cuda {

/// The switch folds sums, and minima and maxima of integers. (It would fold those of halves, too,
/// but no specification says what becomes of a NaN.)
template <typename E, Formula formula>
inline constexpr bool kFoldedBySwitch =
    formula == Formula::add ||
    (std::is_integral_v<E> && (formula == Formula::smaller || formula == Formula::larger));

}  // namespace farandole::cuda

#if defined(__CUDACC__)
#include "cuda/kernels/multimem_cuda.h"
#else
#include "cuda/kernels/multimem_host.h"
#endif
