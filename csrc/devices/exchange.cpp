#include "devices/exchange.h"

namespace farandole {
namespace {

CudaExchange* open(const CudaTable& library, const CudaExchangeShape& shape, OwnBucket& mine) {
  int32_t descriptor = -1;
  CudaExchange* const opened = ask_cuda(library.open_exchange, &shape, &mine.share, &descriptor);
  mine.descriptor = Fd(descriptor);
  return opened;
}

}  // namespace

DeviceExchange::DeviceExchange(const CudaExchangeShape& shape, OwnBucket& mine)
    : library_(cuda_library()),
      device_(shape.device),
      exchange_(open(library_, shape, mine), library_.close_exchange) {}

void DeviceExchange::map(int member, const CudaShare& theirs, const Fd& descriptor) {
  ask_cuda(library_.map_peer, exchange_.get(), member, &theirs, descriptor.get());
}

StepMoments DeviceExchange::moments(const DeviceQueue& queue) {
  return {ask_cuda(library_.open_moments, exchange_.get(), queue.handle()),
          [self = shared_from_this()](CudaMoments* moments) {
            self->library_.close_moments(self->exchange_.get(), moments);
          }};
}

uint32_t DeviceExchange::end(CudaMoments& moments) {
  uint32_t number = 0;
  ask_cuda(library_.end, exchange_.get(), &moments, &number);
  return number;
}

}  // namespace farandole
