#include "schedule/slicing.h"

namespace farandole {

void add(Lane& lane, const Step& step, int segments) {
  for (int s = 0; s < segments; ++s) {
    Step piece = step;
    piece.send = part(step.send, segments, s);
    piece.recv = part(step.recv, segments, s);
    piece.held = part(step.held, segments, s);
    if (piece.to == kNobody || piece.send.count == 0) {
      piece.to = kNobody;
      piece.send = {};
    }
    if (piece.from == kNobody || piece.recv.count == 0) {
      piece.from = kNobody;
      piece.recv = piece.held = {};
      piece.action = Action::store;
      piece.leaf_arrived = piece.leaf_held = piece.finish = false;
    }
    if (piece.to != kNobody || piece.from != kNobody) lane.push_back(piece);
  }
}

}  // namespace farandole
