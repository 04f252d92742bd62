// Rank 0 while ranks meet: it listens, gives everybody a seat, and ends the meeting for all or for
// none.
#pragma once

#include "base/clock.h"
#include "control/host.h"
#include "control/rendezvous.h"

namespace farandole {

Host receive_all(const Invitation& me, Deadline deadline);

}  // namespace farandole
